//! The requests of guests, in files below `crawls/`: sequences recorded from cloud-init's own classes, and a program's
//! request for an identity token.

use super::guest::TOKEN;
use anyhow::{Context as _, Result, bail};
use std::fmt::{self, Write as _};
use support::guest::METADATA;

/// The header fields that python-requests, which cloud-init uses, sends with every request. Despite `keep-alive`,
/// cloud-init drops its session after each answer (cloudinit/url_helper.py, readurl), so the guest closes the
/// connection.
const USUAL: &str = "User-Agent: Cloud-Init/22.4.2\r\nAccept-Encoding: gzip, deflate\r\nAccept: */*\r\n\
                     Connection: keep-alive\r\n";

/// The path of identity tokens.
const IDENTITY: &str = "/v1/identity/jwt?";

/// A cloud dialect that guests boot with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Dialect {
    /// 4 requests
    Nocloud,
    /// 48 requests
    Openstack,
    /// 8 requests: OpenStack's own documents, and only the listing of EC2's tree
    OpenstackAlone,
    /// 46 requests, with a token
    Ec2,
    /// 1 request: for an identity token. This needs `identity` in the agent's configuration and `--subjects xdp-imds`
    Identity,
}

impl fmt::Display for Dialect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nocloud => "nocloud",
            Self::Openstack => "openstack",
            Self::OpenstackAlone => "openstack-alone",
            Self::Ec2 => "ec2",
            Self::Identity => "identity",
        })
    }
}

/// One request of a boot. Path and field may contain the placeholders of [`Plan`](super::guest::Plan).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CrawlRequest {
    pub(crate) method: String,
    pub(crate) path: String,
    /// A header field of this request, without the end of the line.
    pub(crate) field: Option<String>,
}

impl Dialect {
    /// Returns the requests of one boot, in order.
    pub(crate) fn crawl(self) -> Result<Vec<CrawlRequest>> {
        parse(match self {
            Self::Nocloud => include_str!("crawls/nocloud.txt"),
            Self::Openstack => include_str!("crawls/openstack.txt"),
            Self::OpenstackAlone => include_str!("crawls/openstack-alone.txt"),
            Self::Ec2 => include_str!("crawls/ec2.txt"),
            Self::Identity => include_str!("crawls/identity.txt"),
        })
        .with_context(|| format!("the crawl of {self}"))
    }

    /// Returns `serve.smbios` of the guests' records.
    pub(crate) fn smbios(self) -> String {
        match self {
            Self::Identity => Self::Nocloud.to_string(),
            Self::OpenstackAlone => Self::Openstack.to_string(),
            cloud => cloud.to_string(),
        }
    }
}

impl CrawlRequest {
    /// Returns the request's text, with its placeholders.
    pub(crate) fn text(&self) -> String {
        let Self { method, path, field } = self;
        let mut text = format!("{method} {path} HTTP/1.1\r\nHost: {METADATA}\r\n{USUAL}");
        if method == "PUT" {
            text.push_str("Content-Length: 0\r\n");
        }
        if let Some(field) = field {
            let _ = write!(text, "{field}\r\n");
        }
        text + "\r\n"
    }

    /// Whether the node signs the answer, so that only a running agent has it.
    pub(crate) fn is_signed(&self) -> bool {
        self.path.starts_with(IDENTITY)
    }

    /// Whether the answer is a session token, which cannot be known in advance.
    pub(crate) fn brings_token(&self) -> bool {
        self.method == "PUT"
    }

    /// Returns name and value of the request's own field, with `token` in place of the placeholder.
    pub(crate) fn field_with(&self, token: &str) -> Option<(String, String)> {
        let (name, value) = self.field.as_ref()?.split_once(": ")?;
        Some((name.to_owned(), value.replace(TOKEN, token)))
    }
}

fn parse(text: &str) -> Result<Vec<CrawlRequest>> {
    let mut asked = Vec::new();
    let mut field = None;
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        match line.split_once(' ') {
            Some(("header", header)) => field = Some(header.to_owned()),
            Some((method @ ("GET" | "PUT"), path)) if path.starts_with('/') => {
                asked.push(CrawlRequest { method: method.into(), path: path.into(), field: field.clone() });
            }
            _ => bail!("expected `GET PATH`, `PUT PATH` or `header NAME: VALUE`, found `{line}`"),
        }
    }
    Ok(asked)
}

#[cfg(test)]
mod tests {
    use super::{CrawlRequest, Dialect, parse};

    #[test]
    fn crawls_have_their_recorded_length() {
        let lengths = [
            (Dialect::Nocloud, 4),
            (Dialect::Openstack, 48),
            (Dialect::OpenstackAlone, 8),
            (Dialect::Ec2, 46),
            (Dialect::Identity, 1),
        ];
        for (dialect, requests) in lengths {
            let crawl = dialect.crawl().expect("a crawl");
            assert_eq!(crawl.len(), requests, "{dialect}");
            assert_eq!(crawl.iter().any(CrawlRequest::is_signed), dialect == Dialect::Identity, "{dialect}");
        }
    }

    #[test]
    fn ec2_requests_a_token_and_then_sends_it() {
        let crawl = Dialect::Ec2.crawl().expect("a crawl");
        assert!(crawl[0].text().contains("X-aws-ec2-metadata-token-ttl-seconds: 21600\r\n"));
        let others = crawl[1..].iter();
        assert!(
            others
                .into_iter()
                .all(|asked| asked.text().ends_with("X-aws-ec2-metadata-token: {token}\r\n\r\n"))
        );
    }

    #[test]
    fn lines_that_are_not_requests_are_refused() {
        for line in ["POST /", "GET http://x/", "nonsense"] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
