"""The process: configuration, wire, service, metrics, web page, command line."""
