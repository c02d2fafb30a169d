"""Answers each request by whose it is, as its fields say, at port 8775 of this namespace."""

import http.server


class Echo(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        names = ("X-Instance-ID", "X-Tenant-ID", "X-Forwarded-For")
        body = " ".join(self.headers[name] for name in names).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


http.server.ThreadingHTTPServer(("127.0.0.1", 8775), Echo).serve_forever()
