"""What Google's auth library learns on an instance, by the name metadata.google.internal."""
import json

from google.auth.compute_engine import Credentials, _metadata
from google.auth.transport.requests import Request

request = Request()
credentials = Credentials()
credentials.refresh(request)
print(
    json.dumps(
        {
            "ping": _metadata.ping(request),
            "project": _metadata.get_project_id(request),
            "email": credentials.service_account_email,
            "token": credentials.token,
            "expired": credentials.expired,
        }
    )
)
