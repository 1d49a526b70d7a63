"""The command line and what it runs: demo, server, doctor, status, measurements. The top of the import order."""
