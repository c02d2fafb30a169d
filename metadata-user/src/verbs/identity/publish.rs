//! `xdp-imds identity publish`: writes what verifiers fetch below the issuer's URL.

mod fetch;

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use metadata_signer::jwt::Joined;
use serde_json::Value;

use super::add;
use crate::config::Config;
use crate::identity::configuration;

/// File of the issuer's metadata (OpenID Connect Discovery 1.0 section 4).
const METADATA: &str = "openid-configuration";
/// File of the public keys.
const KEYS: &str = "jwks.json";

#[derive(Args)]
#[command(group = clap::ArgGroup::new("to").required(true).args(["out", "config_map"]))]
pub(super) struct Arguments {
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

impl Arguments {
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
        let mut joined = Joined::default();
        if self.sources.is_empty() {
            add(&mut joined, &identity.keys, identity.algorithm)?;
        }
        for source in &self.sources {
            if source.starts_with(fetch::SCHEME) {
                for set in fetch::sets(source).with_context(|| format!("fetching {source}"))? {
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
