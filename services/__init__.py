"""The services of Headrace, one package each. They never import each other."""
