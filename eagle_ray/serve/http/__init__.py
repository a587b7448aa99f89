"""Bodies of HTTP requests and answers, as every route reads and writes them."""
