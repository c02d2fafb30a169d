//! `xdp-imds identity`: makes keys of identity tokens, prints and publishes public keys, and is the signer.

use anyhow::{Context as _, bail, ensure};
use clap::{Args, Subcommand, ValueEnum};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1::handshake;
use hyper::{Request, Uri, header};
use hyper_util::rt::TokioIo;
use metadata_content::parser;
use metadata_datapath::sandbox::{SandboxMode, SandboxStage};
use metadata_feed::state::private_file;
use metadata_signer::jwt::JoinedKeySet;
use metadata_signer::{
    Algorithm, DirectoryError, KeyDirectory, Rotation, SigningKey, SigningKeyError, directory, jwt,
};
use rustix::process::{Signal, set_parent_process_death_signal};
use serde_json::Value;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::collections::BTreeMap;
use std::io::{Read as _, Write};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, SystemTime};
use std::{fs, io};
use tokio::net::{TcpStream, lookup_host};
use tokio::runtime::Builder;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tracing::warn;

use super::{Exit, ExitError};
use crate::config::{Config, Sandbox};
use crate::identity::configuration;

/// Maximum size of a file of public keys, in bytes.
pub const JWKS_BYTES: u64 = 16 << 20;

/// Arguments of the verb.
#[derive(Args)]
pub struct IdentityArgs {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Make a key.
    ///
    /// With DIR, writes it there as a file named by the time, and prints its path; otherwise prints the key, which is a
    /// secret.
    Key {
        /// Directory of keys; it is created if it is missing.
        #[arg(value_name = "DIR")]
        dir: Option<PathBuf>,
        /// Algorithm of the key.
        ///
        /// Keys for RS256 come from OpenSSL; the error names the command.
        #[arg(long, value_enum, default_value_t = Kind::Es256)]
        algorithm: Kind,
    },
    /// Print the public keys of a directory of keys, or of files joined into one JSON Web Key Set.
    ///
    /// Refuses a set with private members.
    Jwks {
        /// A directory of keys, or files with a JSON Web Key Set each.
        #[arg(value_name = "DIR|FILE", required = true)]
        paths: Vec<PathBuf>,
        /// Algorithm of the keys in a directory [default: ES256, if all keys are for it].
        #[arg(long, value_enum)]
        algorithm: Option<Kind>,
        /// Print the keys as a SPIFFE bundle.
        #[arg(long)]
        spiffe: bool,
    },
    /// Publish the public keys and the metadata of an issuer, for verifiers that do not reach the agents.
    ///
    /// A configuration names the issuer. They are written as files for a web server, or to a ConfigMap.
    Publish(PublishArgs),
    /// Be the signer of the agent at standard input.
    #[command(hide = true)]
    Signer {
        /// Whether to drop the system calls and capabilities that signing does not need.
        #[arg(long, value_enum, default_value_t = Sandbox::On)]
        sandbox: Sandbox,
    },
}

/// An algorithm.
#[derive(Clone, Copy, ValueEnum)]
enum Kind {
    /// ECDSA with P-256 and SHA-256.
    #[value(name = "ES256")]
    Es256,
    /// RSA with SHA-256.
    #[value(name = "RS256")]
    Rs256,
    /// Ed25519.
    #[value(name = "EdDSA")]
    EdDsa,
}

impl From<Kind> for Algorithm {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::Es256 => Self::Es256,
            Kind::Rs256 => Self::Rs256,
            Kind::EdDsa => Self::EdDsa,
        }
    }
}

impl IdentityArgs {
    /// Runs the verb.
    ///
    /// # Errors
    /// If a key or a set is unusable, or the signer ends before the agent.
    pub fn run(self, out: &mut impl Write) -> anyhow::Result<()> {
        match self.verb {
            Verb::Key { dir, algorithm } => key(dir.as_deref(), algorithm.into(), out),
            Verb::Jwks { paths, algorithm, spiffe } => {
                print_jwks(&paths, KeyChoice::of_option(algorithm.map(Into::into)), spiffe, out)
            }
            Verb::Publish(arguments) => arguments.run(out),
            Verb::Signer { sandbox } => signer(sandbox),
        }
    }
}

fn key(dir: Option<&Path>, algorithm: Algorithm, out: &mut impl Write) -> anyhow::Result<()> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_secs();
    match dir {
        // The text ends with a newline.
        None => write!(out, "{}", SigningKey::generate(algorithm)?)?,
        Some(dir) => writeln!(out, "{}", directory::make(dir, algorithm, now)?.display())?,
    }
    Ok(())
}

/// Which keys of a directory are meant.
#[derive(Clone, Copy)]
struct KeyChoice {
    algorithm: Algorithm,
    /// True if somebody chose the algorithm. Keys for others are then left out, as the agent leaves them out.
    is_chosen: bool,
    /// What chooses the algorithm.
    setting: &'static str,
}

impl KeyChoice {
    fn of_option(algorithm: Option<Algorithm>) -> Self {
        let is_chosen = algorithm.is_some();
        Self { algorithm: algorithm.unwrap_or_default(), is_chosen, setting: "--algorithm" }
    }

    fn of_configuration(algorithm: Algorithm) -> Self {
        Self { algorithm, is_chosen: true, setting: "identity.algorithm" }
    }
}

fn print_jwks(
    paths: &[PathBuf],
    choice: KeyChoice,
    spiffe: bool,
    out: &mut impl Write,
) -> anyhow::Result<()> {
    let mut joined = JoinedKeySet::default();
    paths.iter().try_for_each(|path| add(&mut joined, path, choice))?;
    let set = if spiffe { joined.into_bundle()? } else { joined.into_set() };
    serde_json::to_writer_pretty(&mut *out, &set)?;
    writeln!(out)?;
    Ok(())
}

/// Adds the public keys of a directory or a file. Warns of keys that are left out.
fn add(joined: &mut JoinedKeySet, path: &Path, choice: KeyChoice) -> anyhow::Result<()> {
    let set = if path.is_dir() {
        let (set, left_out) = of_directory(path, choice)?;
        for file in left_out {
            warn!(
                "{}: left out, because it is no key for {}; remove the file",
                file.display(),
                choice.algorithm
            );
        }
        set
    } else {
        of_file(path)?
    };
    joined.add(&set).with_context(|| format!("cannot read {}", path.display()))
}

/// Returns the public keys of a directory, and the files of keys for other algorithms.
fn of_directory(path: &Path, choice: KeyChoice) -> anyhow::Result<(Value, Vec<PathBuf>)> {
    let KeyChoice { algorithm, is_chosen, setting } = choice;
    let mut keys = KeyDirectory::new(path.to_owned(), algorithm, Rotation { publish_for: 0, after: None });
    let mut others = Vec::new();
    for reason in keys.look()? {
        match reason {
            DirectoryError::Key { path, source: SigningKeyError::Kind(_) } => others.push(path),
            // A set without one of the keys would look complete.
            reason => return Err(reason.into()),
        }
    }
    let has_keys = keys.keys().len() > 0;
    if let Some(other) = others.first().filter(|_| !is_chosen || !has_keys) {
        bail!(
            "{}: expected a key for {algorithm}, found another; `{setting}` names the algorithm of the keys that are \
             meant",
            other.display()
        );
    }
    ensure!(
        has_keys,
        "expected a key in {shown}, found none; `xdp-imds identity key {shown}` makes one",
        shown = path.display()
    );
    Ok((jwt::of(keys.keys()), others))
}

fn of_file(path: &Path) -> anyhow::Result<Value> {
    let reading = || format!("cannot read {}", path.display());
    let mut bytes = Vec::new();
    let file = fs::File::open(path).with_context(reading)?;
    file.take(JWKS_BYTES + 1).read_to_end(&mut bytes).with_context(reading)?;
    anyhow::ensure!(
        bytes.len() as u64 <= JWKS_BYTES,
        "{}: expected at most {JWKS_BYTES} bytes, found more",
        path.display()
    );
    // The parser's message could repeat a part of a private key.
    parser::json(&bytes).map_err(|error| {
        anyhow::anyhow!("{}: expected JSON, found an error in line {}", path.display(), error.line())
    })
}

fn signer(sandbox: Sandbox) -> anyhow::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL)).context("ending with the agent")?;
    // The agent may need tokens while it drains. The signer ends when the agent closes the socket.
    for signal in [SIGHUP, SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)))?;
    }
    SandboxMode::from(sandbox).enter(SandboxStage::Sign)?;
    metadata_signer::run(io::stdin())?;
    Ok(())
}

// `xdp-imds identity publish`: writes what verifiers fetch below the issuer's URL.

/// File of the issuer's metadata (OpenID Connect Discovery 1.0 section 4).
const METADATA: &str = "openid-configuration";
/// File of the public keys.
const KEYS: &str = "jwks.json";
/// Mode of both.
const PUBLIC: u32 = 0o644;

#[derive(Args)]
#[command(group = clap::ArgGroup::new("to").required(true).args(["out", "config_map"]))]
struct PublishArgs {
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
    /// Credentials for the API server, outside the cluster.
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
    fn run(self, out: &mut impl Write) -> anyhow::Result<()> {
        let documents = self.documents().context("nothing is published")?;
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
                let (namespace, name) = target.split_once('/').ok_or_else(|| {
                    let text = format!("--config-map: expected NAMESPACE/NAME, found `{target}`");
                    ExitError::new(Exit::Usage, text)
                })?;
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
        let identity = config.identity.with_context(|| {
            format!("{file}: expected `identity` with the issuer and its keys, found none; --config names another file")
        })?;
        let choice = KeyChoice::of_configuration(identity.algorithm);
        let mut joined = JoinedKeySet::default();
        if self.sources.is_empty() {
            let keys = &identity.keys;
            ensure!(
                keys.is_dir(),
                "{file}: expected a directory of keys at {shown}, found none; `xdp-imds identity key {shown}` makes one \
                 with a key, and an argument names another directory, a file or the agents' URL",
                shown = keys.display()
            );
            add(&mut joined, keys, choice)?;
        }
        for source in &self.sources {
            if source.starts_with(SCHEME) {
                for set in sets(source).with_context(|| format!("fetching {source}"))? {
                    joined.add(&set).with_context(|| format!("cannot read {source}"))?;
                }
            } else {
                add(&mut joined, Path::new(source), choice)?;
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
        Ok(metadata_feed::kubevirt::replace_config_map(kubeconfig, namespace, name, documents)?)
    }

    #[cfg(not(feature = "kubevirt"))]
    fn write_config_map(&self, _: &str, _: &str, _: &BTreeMap<&str, String>) -> anyhow::Result<()> {
        bail!("--config-map: this agent was built without the feature `kubevirt`; use --out")
    }
}

/// Replaces a file at once, so that no verifier reads a part of it, not even after a loss of power.
fn replace(path: &Path, text: &str) -> anyhow::Result<()> {
    let replaced = private_file::replace_by(path, None, |file| {
        file.write_all(text.as_bytes())?;
        // The web server is another user, whatever the umask of this process.
        file.set_permissions(fs::Permissions::from_mode(PUBLIC))
    });
    replaced.with_context(|| format!("cannot write {}", path.display()))
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

#[cfg(test)]
mod tests {
    use metadata_signer::{Algorithm, directory};
    use serde_json::Value;
    use std::fs;
    use std::path::Path;

    use super::{KEYS, KeyChoice, PublishArgs, print_jwks};

    /// Creates a directory with a key for each of these algorithms.
    fn keys(algorithms: &[Algorithm]) -> tempfile::TempDir {
        let room = tempfile::tempdir().expect("a directory");
        for (made_at, algorithm) in (1_795_428_000..).zip(algorithms) {
            directory::make(room.path(), *algorithm, made_at).expect("made");
        }
        room
    }

    /// Returns the algorithm of each key in a set.
    fn algorithms(set: &str) -> Vec<String> {
        let set: Value = serde_json::from_str(set).expect("JSON");
        let keys = set["keys"].as_array().expect("a list");
        keys.iter().map(|key| key["alg"].as_str().expect("an algorithm").to_owned()).collect()
    }

    fn published(keys: &Path, algorithm: Algorithm) -> anyhow::Result<Vec<String>> {
        let room = tempfile::tempdir().expect("a directory");
        let config = room.path().join("config.yaml");
        let keys = keys.display();
        let text = format!(
            "identity: {{issuer: 'https://id.example.org', keys: '{keys}', algorithm: {algorithm}}}\n"
        );
        fs::write(&config, text).expect("written");
        let arguments =
            PublishArgs { config, out: None, config_map: None, kubeconfig: None, sources: Vec::new() };
        arguments.documents().map(|documents| algorithms(&documents[KEYS]))
    }

    fn printed(keys: &Path, algorithm: Option<Algorithm>) -> anyhow::Result<Vec<String>> {
        let mut out = Vec::new();
        print_jwks(&[keys.to_owned()], KeyChoice::of_option(algorithm), false, &mut out)?;
        Ok(algorithms(&String::from_utf8(out).expect("text")))
    }

    #[test]
    fn keys_of_a_former_algorithm_are_left_out_of_what_is_published() {
        use Algorithm::{EdDsa, Es256, Rs256};
        for (made, algorithm, expected) in [
            (&[Es256, EdDsa][..], EdDsa, Ok("EdDSA")),
            (&[Es256, EdDsa], Es256, Ok("ES256")),
            (&[EdDsa], EdDsa, Ok("EdDSA")),
            (&[Es256, EdDsa], Rs256, Err("`identity.algorithm` names")),
            (&[], EdDsa, Err("expected a key in ")),
        ] {
            let room = keys(made);
            let found = published(room.path(), algorithm).map_err(|error| error.to_string());
            match expected {
                Ok(expected) => assert_eq!(found, Ok(vec![expected.to_owned()]), "{made:?} {algorithm}"),
                Err(text) => {
                    let error = found.expect_err("no key is meant");
                    assert!(error.contains(text), "{made:?} {algorithm}: {error}");
                }
            }
        }
    }

    #[test]
    fn keys_for_several_algorithms_are_printed_only_if_one_is_chosen() {
        use Algorithm::{EdDsa, Es256, Rs256};
        for (made, chosen, expected) in [
            (&[Es256][..], None, Ok("ES256")),
            (&[Es256, EdDsa], Some(EdDsa), Ok("EdDSA")),
            (&[Es256, EdDsa], Some(Es256), Ok("ES256")),
            (&[Es256, EdDsa], None, Err("`--algorithm` names")),
            (&[EdDsa], None, Err("`--algorithm` names")),
            (&[EdDsa], Some(Rs256), Err("`--algorithm` names")),
        ] {
            let room = keys(made);
            let found = printed(room.path(), chosen).map_err(|error| error.to_string());
            match expected {
                Ok(expected) => assert_eq!(found, Ok(vec![expected.to_owned()]), "{made:?} {chosen:?}"),
                Err(text) => {
                    let error = found.expect_err("another key is there");
                    assert!(error.contains(text), "{made:?} {chosen:?}: {error}");
                }
            }
        }
    }

    #[test]
    fn a_file_that_may_be_a_key_that_is_meant_is_never_left_out() {
        let room = keys(&[Algorithm::EdDsa]);
        fs::write(room.path().join("damaged.pem"), "no key").expect("written");
        for found in [published(room.path(), Algorithm::EdDsa), printed(room.path(), Some(Algorithm::EdDsa))]
        {
            let error = found.expect_err("the set would look complete").to_string();
            assert!(error.contains("damaged.pem"), "{error}");
        }
    }
}
