"""Prints the token that Azure's identity library gets for a virtual machine's managed identity."""
import json
import time

from azure.identity import ManagedIdentityCredential

token = ManagedIdentityCredential().get_token("https://management.azure.com/.default")
print(json.dumps({"token": token.token, "expired": token.expires_on <= time.time()}))
