//! `xdp-imds identity publish`: writes what verifiers fetch below the issuer's URL.

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1::handshake;
use hyper::{Request, Uri, header};
use hyper_util::rt::TokioIo;
use metadata_content::parser;
use metadata_signer::jwt::JoinedKeySet;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::net::{TcpStream, lookup_host};
use tokio::runtime::Builder;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::{JWKS_BYTES, add};
use crate::config::Config;
use crate::identity::configuration;

/// File of the issuer's metadata (OpenID Connect Discovery 1.0 section 4).
const METADATA: &str = "openid-configuration";
/// File of the public keys.
const KEYS: &str = "jwks.json";

#[derive(Args)]
#[command(group = clap::ArgGroup::new("to").required(true).args(["out", "config_map"]))]
pub(super) struct PublishArgs {
    /// The agent's configuration file. Its field `identity` names the issuer and the directory of keys.
    #[arg(long, value_name = "FILE", default_value = "/etc/xdp-imds/config.yaml")]
    config: PathBuf,
    /// Directory that gets the files `openid-configuration` and `jwks.json`; a web server serves it as `/.well-known`.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// ConfigMap that gets the same two keys, as NAMESPACE/NAME. It must exist.
    #[cfg_attr(not(feature = "kubevirt"), arg(hide = true))]
    #[arg(long, value_name = "NAMESPACE/NAME")]
    config_map: Option<String>,
    /// Credentials for the API server, outside of its cluster.
    #[cfg_attr(not(feature = "kubevirt"), arg(hide = true))]
    #[arg(long, value_name = "FILE", requires = "config_map")]
    kubeconfig: Option<PathBuf>,
    /// Where the keys come from: a directory of keys, a file with a JSON Web Key Set, or a URL of one
    /// (`http://AGENT:9177/.well-known/jwks.json`; each address of the host is asked). Default: the directory of the
    /// configuration.
    #[arg(value_name = "DIR|FILE|URL")]
    sources: Vec<String>,
}

impl PublishArgs {
    pub(super) fn run(self, out: &mut impl Write) -> anyhow::Result<()> {
        let documents = self.documents()?;
        match (&self.out, &self.config_map) {
            (Some(directory), _) => {
                fs::create_dir_all(directory)
                    .with_context(|| format!("cannot make the directory {}", directory.display()))?;
                for (name, text) in &documents {
                    replace(&directory.join(name), text)?;
                }
                writeln!(out, "{}: {METADATA} and {KEYS}", directory.display())?;
            }
            (None, Some(target)) => {
                let (namespace, name) = target
                    .split_once('/')
                    .with_context(|| format!("--config-map: expected NAMESPACE/NAME, found `{target}`"))?;
                self.write_config_map(namespace, name, &documents)?;
                writeln!(out, "ConfigMap {target}: {METADATA} and {KEYS}")?;
            }
            (None, None) => bail!("expected --out or --config-map, found neither"),
        }
        Ok(())
    }

    fn documents(&self) -> anyhow::Result<BTreeMap<&'static str, String>> {
        let file = self.config.display();
        let config = Config::read(&self.config)?;
        config.validate()?;
        let identity = config.identity.with_context(|| format!("{file}: expected `identity`, found none"))?;
        let mut joined = JoinedKeySet::default();
        if self.sources.is_empty() {
            add(&mut joined, &identity.keys, identity.algorithm)?;
        }
        for source in &self.sources {
            if source.starts_with(SCHEME) {
                for set in sets(source).with_context(|| format!("fetching {source}"))? {
                    joined.add(&set).with_context(|| format!("reading {source}"))?;
                }
            } else {
                add(&mut joined, Path::new(source), identity.algorithm)?;
            }
        }
        let keys = joined.into_set();
        // Verifiers would refuse all tokens.
        let has_keys = keys["keys"].as_array().is_some_and(|keys| !keys.is_empty());
        ensure!(has_keys, "expected a key to publish, found none; `xdp-imds identity key` makes one");
        let metadata = configuration(&identity.issuer, &identity.jwks_uri(), identity.algorithm);
        let text = |document: &Value| format!("{document:#}\n");
        Ok([(METADATA, text(&metadata)), (KEYS, text(&keys))].into())
    }

    #[cfg(feature = "kubevirt")]
    fn write_config_map(
        &self,
        namespace: &str,
        name: &str,
        documents: &BTreeMap<&str, String>,
    ) -> anyhow::Result<()> {
        let kubeconfig = self.kubeconfig.clone();
        Ok(metadata_feed::kubevirt::options::replace(kubeconfig, namespace, name, documents)?)
    }

    #[cfg(not(feature = "kubevirt"))]
    fn write_config_map(&self, _: &str, _: &str, _: &BTreeMap<&str, String>) -> anyhow::Result<()> {
        bail!("--config-map: this agent was built without the feature `kubevirt`; use --out")
    }
}

/// Replaces a file at once, so that no verifier reads a part of it.
fn replace(path: &Path, text: &str) -> anyhow::Result<()> {
    let aside = path.with_extension("new");
    fs::write(&aside, text)
        .and_then(|()| fs::rename(&aside, path))
        .with_context(|| format!("writing {}", path.display()))
}

// Fetches the public keys that agents publish.

/// What a URL begins with. Agents publish without TLS, in the network of their nodes.
const SCHEME: &str = "http://";
/// Longest time for one agent's answer.
const WITHIN: Duration = Duration::from_secs(10);
/// Maximum number of addresses of one host.
const ADDRESSES: usize = 4096;

/// Returns the set of each address that the URL's host has. A set that is missing would make tokens fail, so one agent
/// that does not answer is an error.
fn sets(url: &str) -> anyhow::Result<Vec<Value>> {
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
    let limit = usize::try_from(JWKS_BYTES)?;
    let body = Limited::new(answer.into_body(), limit).collect().await;
    let body = body.map_err(|error| anyhow::anyhow!("expected at most {limit} bytes: {error}"))?;
    // The parser's message could repeat a part of what is no key set.
    parser::json(body.to_bytes()).map_err(|_| anyhow::anyhow!("expected JSON, found something else"))
}
