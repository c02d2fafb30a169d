"""What Google's auth library learns on an instance, by the name metadata.google.internal."""
import json

import google.auth
from google.auth.compute_engine import _metadata
from google.auth.transport.requests import Request

request = Request()
# Asks `/` for the header field that only this cloud answers with, and knows no other way here.
credentials, project = google.auth.default()
credentials.refresh(request)
print(
    json.dumps(
        {
            "ping": _metadata.ping(request),
            "credentials": type(credentials).__module__,
            "project": project,
            "email": credentials.service_account_email,
            "token": credentials.token,
            "expired": credentials.expired,
        }
    )
)
