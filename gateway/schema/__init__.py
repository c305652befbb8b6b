"""What goes over the wire: requests, responses and errors of the OpenAI API, plus `outrider`."""
