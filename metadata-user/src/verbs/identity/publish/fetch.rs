//! Fetches the public keys that agents publish.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1::handshake;
use hyper::{Request, Uri, header};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::{TcpStream, lookup_host};
use tokio::runtime::Builder;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::super::JWKS_OCTETS;
use metadata_content::parser;

/// What a URL begins with. Agents publish without TLS, in the network of their nodes.
pub(super) const SCHEME: &str = "http://";
/// Longest time for one agent's answer.
const WITHIN: Duration = Duration::from_secs(10);
/// Maximum number of addresses of one host.
const ADDRESSES: usize = 4096;

/// Returns the set of each address that the URL's host has. A set that is missing would make tokens fail, so one agent
/// that does not answer is an error.
pub(super) fn sets(url: &str) -> anyhow::Result<Vec<Value>> {
    let url: Uri = url.parse()?;
    let host = url.authority().context("expected a host, found none")?;
    let place = format!("{}:{}", host.host(), host.port_u16().unwrap_or(80));
    Builder::new_current_thread().enable_all().build()?.block_on(async {
        let addresses: Vec<_> = timeout(WITHIN, lookup_host(place)).await??.collect();
        ensure!(
            (1..=ADDRESSES).contains(&addresses.len()),
            "expected 1 to {ADDRESSES} addresses, found {}",
            addresses.len()
        );
        let mut tasks = JoinSet::new();
        for address in addresses {
            let url = url.clone();
            tasks.spawn(async move {
                let set = timeout(WITHIN, fetch(address, &url)).await;
                set.map_err(anyhow::Error::from).flatten().with_context(|| address.to_string())
            });
        }
        tasks.join_all().await.into_iter().collect()
    })
}

async fn fetch(address: SocketAddr, url: &Uri) -> anyhow::Result<Value> {
    let stream = TcpStream::connect(address).await?;
    let (mut sender, connection) = handshake(TokioIo::new(stream)).await?;
    // It ends with the connection.
    tokio::spawn(connection);
    let host = url.authority().map_or("", |authority| authority.as_str());
    let path = url.path_and_query().map_or("/", |path| path.as_str());
    let request = Request::get(path).header(header::HOST, host).body(Empty::<Bytes>::new())?;
    let answer = sender.send_request(request).await?;
    ensure!(answer.status().is_success(), "expected status 200, found {}", answer.status());
    let limit = usize::try_from(JWKS_OCTETS)?;
    let body = Limited::new(answer.into_body(), limit).collect().await;
    let body = body.map_err(|error| anyhow::anyhow!("expected at most {limit} octets: {error}"))?;
    // The parser's message could repeat a part of what is no key set.
    parser::json(body.to_bytes()).map_err(|_| anyhow::anyhow!("expected JSON, found something else"))
}
