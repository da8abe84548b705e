from clipctl.cli.app import main

main()
