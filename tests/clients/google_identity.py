"""Prints the identity token that Google's auth library fetches for INPUT's audience."""
import json

from google.auth.transport.requests import Request
from google.oauth2 import id_token

print(json.dumps(id_token.fetch_id_token(Request(), INPUT["audience"])))
