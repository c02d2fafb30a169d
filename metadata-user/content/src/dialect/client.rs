//! Recognises cloud-init by its `User-Agent`, for the few documents that need a different form for some versions.

use crate::http::Request;

/// Returns year and number of cloud-init's version (`Cloud-Init/22.4.2-1+deb12u4`).
pub(super) fn cloud_init(request: &Request<'_>) -> Option<(u32, u32)> {
    let agent = std::str::from_utf8(request.headers.get("User-Agent")?).ok()?;
    let version = agent.strip_prefix("Cloud-Init/")?;
    let mut numbers = version.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Returns whether the client is cloud-init of any version.
pub(super) fn is_cloud_init(request: &Request<'_>) -> bool {
    request.headers.get("User-Agent").is_some_and(|agent| agent.starts_with(b"Cloud-Init/"))
}

#[cfg(test)]
mod tests {
    use super::{cloud_init, is_cloud_init};
    use crate::http::{Headers, Method, Request, RequestTarget};

    #[test]
    fn the_version_is_year_and_number() {
        for (agent, version) in [
            ("Cloud-Init/22.4.2", Some((22, 4))),
            ("Cloud-Init/22.4.2-1+deb12u4 - OS: debian", Some((22, 4))),
            ("Cloud-Init/25.1", Some((25, 1))),
            ("Cloud-Init/next", None),
            ("Cloud-Init/22", None),
            ("curl/8 Cloud-Init/22.4", None),
            ("", None),
        ] {
            let fields = [httparse::Header { name: "user-agent", value: agent.as_bytes() }];
            let target = RequestTarget { path: "/", query: "" };
            let request = Request { method: Method::Get, target, headers: Headers::new(&fields), body: b"" };
            assert_eq!(cloud_init(&request), version, "{agent}");
            assert_eq!(is_cloud_init(&request), agent.starts_with("Cloud"), "{agent}");
        }
    }
}
