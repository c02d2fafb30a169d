//! What guests ask: request sequences recorded from cloud-init's own classes, in files under `crawls/`.

use super::guest::TOKEN;
use anyhow::{Context as _, Result, bail};
use std::fmt::{self, Write as _};
use support::guest::METADATA;

/// What python-requests, which cloud-init uses, sends with every request. Though it says `keep-alive`,
/// cloud-init drops its session after each answer (cloudinit/url_helper.py, readurl): the guest closes.
const USUAL: &str = "User-Agent: Cloud-Init/22.4.2\r\nAccept-Encoding: gzip, deflate\r\nAccept: */*\r\n\
                     Connection: keep-alive\r\n";

/// A cloud whose guests boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Dialect {
    /// 4 requests
    Nocloud,
    /// 48 requests
    Openstack,
    /// 46 requests, with a token
    Ec2,
}

impl fmt::Display for Dialect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nocloud => "nocloud",
            Self::Openstack => "openstack",
            Self::Ec2 => "ec2",
        })
    }
}

/// One request of a boot. The path and the fields may hold gaps, as a plan's requests do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) method: String,
    pub(crate) path: String,
    /// A field of its own, without the line's end.
    pub(crate) field: Option<String>,
}

impl Dialect {
    /// The requests of one boot, in order.
    pub(crate) fn crawl(self) -> Result<Vec<Asked>> {
        parse(match self {
            Self::Nocloud => include_str!("crawls/nocloud.txt"),
            Self::Openstack => include_str!("crawls/openstack.txt"),
            Self::Ec2 => include_str!("crawls/ec2.txt"),
        })
        .with_context(|| format!("the crawl of {self}"))
    }
}

impl Asked {
    /// The request as it is sent.
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

    /// Whether the answer is a token, which nobody knows beforehand.
    pub(crate) fn brings_token(&self) -> bool {
        self.method == "PUT"
    }

    /// The field with a token in place.
    pub(crate) fn field_with(&self, token: &str) -> Option<(String, String)> {
        let (name, value) = self.field.as_ref()?.split_once(": ")?;
        Some((name.to_owned(), value.replace(TOKEN, token)))
    }
}

fn parse(text: &str) -> Result<Vec<Asked>> {
    let mut asked = Vec::new();
    let mut field = None;
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        match line.split_once(' ') {
            Some(("header", header)) => field = Some(header.to_owned()),
            Some((method @ ("GET" | "PUT"), path)) if path.starts_with('/') => {
                asked.push(Asked { method: method.into(), path: path.into(), field: field.clone() });
            }
            _ => bail!("expected `GET PATH`, `PUT PATH` or `header NAME: VALUE`, found `{line}`"),
        }
    }
    Ok(asked)
}

#[cfg(test)]
mod tests {
    use super::{Dialect, parse};

    #[test]
    fn crawls_have_the_length_they_were_recorded_with() {
        for (dialect, requests) in [(Dialect::Nocloud, 4), (Dialect::Openstack, 48), (Dialect::Ec2, 46)] {
            assert_eq!(dialect.crawl().expect("a crawl").len(), requests, "{dialect}");
        }
    }

    #[test]
    fn ec2_asks_for_a_token_and_then_shows_it() {
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
    fn what_is_no_request_is_refused() {
        for line in ["POST /", "GET http://x/", "nonsense"] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
