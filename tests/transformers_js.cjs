// Embeddings of a model by transformers.js: node transformers_js.cjs MODULES MODEL DTYPE < request > answer
// MODULES: a directory in which npm installed @huggingface/transformers. The request has captions and picture files.
const { createRequire } = require("node:module");
const fs = require("node:fs");
const path = require("node:path");

const [modules, model, dtype] = process.argv.slice(2);
const hf = createRequire(path.join(path.resolve(modules), "here.cjs"))("@huggingface/transformers");
const name = path.basename(path.resolve(model));
hf.env.allowRemoteModels = false;
hf.env.localModelPath = path.dirname(path.resolve(model));

async function main() {
  const { captions, pictures } = JSON.parse(fs.readFileSync(0, "utf8"));
  const tokenizer = await hf.AutoTokenizer.from_pretrained(name);
  const processor = await hf.AutoProcessor.from_pretrained(name);
  const text = await hf.CLIPTextModelWithProjection.from_pretrained(name, { dtype });
  const vision = await hf.CLIPVisionModelWithProjection.from_pretrained(name, { dtype });
  const tokens = tokenizer(captions, { padding: true, truncation: true });
  const images = await processor(await Promise.all(pictures.map((file) => hf.RawImage.read(file))));
  const answer = {
    version: hf.env.version,
    input_ids: tokens.input_ids.tolist().map((row) => row.map(Number)),
    text: (await text({ input_ids: tokens.input_ids })).text_embeds.tolist(),
    image: (await vision({ pixel_values: images.pixel_values })).image_embeds.tolist(),
  };
  process.stdout.write(JSON.stringify(answer));
}

main();
