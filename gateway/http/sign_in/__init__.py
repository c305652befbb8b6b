"""Sign-in of people on the pages: OpenID Connect's code flow, sessions in a cookie."""
