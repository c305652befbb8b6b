"""Wire format: requests, responses and errors of the OpenAI API, plus `outrider`."""
