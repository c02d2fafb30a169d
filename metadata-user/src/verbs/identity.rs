//! `xdp-imds identity`: makes keys of identity tokens, prints and publishes public keys, and is the signer.

mod publish;

use std::fs;
use std::io::{self, Read as _, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::SystemTime;

use anyhow::Context as _;
use clap::{Args, Subcommand, ValueEnum};
use metadata_datapath::sandbox::{SandboxMode, SandboxStage};
use metadata_signer::jwt::{self, JoinedKeySet};
use metadata_signer::{Algorithm, KeyDirectory, Rotation, SigningKey, directory};
use rustix::process::{Signal, set_parent_process_death_signal};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::config::Sandbox;
use metadata_content::parser;

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
        /// Directory of keys; it is made if it is missing.
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
        /// Algorithm of the keys in a directory.
        #[arg(long, value_enum, default_value_t = Kind::Es256)]
        algorithm: Kind,
        /// Print the keys as a SPIFFE bundle.
        #[arg(long)]
        spiffe: bool,
    },
    /// Publish the public keys and the metadata of an issuer, for verifiers that do not reach the agents.
    ///
    /// A configuration names the issuer. They are written as files for a web server, or to a ConfigMap.
    Publish(publish::PublishArgs),
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
            Verb::Jwks { paths, algorithm, spiffe } => print_jwks(&paths, algorithm.into(), spiffe, out),
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

fn print_jwks(
    paths: &[PathBuf],
    algorithm: Algorithm,
    spiffe: bool,
    out: &mut impl Write,
) -> anyhow::Result<()> {
    let mut joined = JoinedKeySet::default();
    paths.iter().try_for_each(|path| add(&mut joined, path, algorithm))?;
    let set = if spiffe { joined.into_bundle()? } else { joined.into_set() };
    serde_json::to_writer_pretty(&mut *out, &set)?;
    writeln!(out)?;
    Ok(())
}

/// Adds the public keys of a directory or a file.
fn add(joined: &mut JoinedKeySet, path: &Path, algorithm: Algorithm) -> anyhow::Result<()> {
    let set = if path.is_dir() { of_directory(path, algorithm)? } else { of_file(path)? };
    joined.add(&set).with_context(|| format!("reading {}", path.display()))
}

fn of_directory(path: &Path, algorithm: Algorithm) -> anyhow::Result<serde_json::Value> {
    let mut keys = KeyDirectory::new(path.to_owned(), algorithm, Rotation { publish_for: 0, after: None });
    // A set without one of the keys would look complete.
    match keys.look()?.into_iter().next() {
        Some(reason) => Err(reason.into()),
        None if keys.keys().len() == 0 => anyhow::bail!(
            "expected a key in {shown}, found none; `xdp-imds identity key {shown}` makes one",
            shown = path.display()
        ),
        None => Ok(jwt::of(keys.keys())),
    }
}

fn of_file(path: &Path) -> anyhow::Result<serde_json::Value> {
    let reading = || format!("reading {}", path.display());
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
    set_parent_process_death_signal(Some(Signal::KILL)).context("following the agent to its end")?;
    // The agent may need tokens while it drains. The signer ends when the agent closes the socket.
    for signal in [SIGHUP, SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)))?;
    }
    SandboxMode::from(sandbox).enter(SandboxStage::Sign)?;
    metadata_signer::run(io::stdin())?;
    Ok(())
}
