"""Verifies a token by Google's auth library. INPUT has the token, audiences, and the URL of the public keys."""
import json

import jwt
from google.auth.transport.requests import Request
from google.oauth2 import id_token


def judged(audience):
    try:
        return id_token.verify_token(INPUT["token"], Request(), audience, certs_url=INPUT["keys"])
    except jwt.PyJWTError as refused:
        return type(refused).__name__


print(json.dumps([judged(audience) for audience in INPUT["audiences"]]))
