//! The unmodified metadata client of systemd (`systemd-imdsd`, since version 261), and its table of the addresses,
//! headers and keys of each cloud (`hwdb.d/40-imds.hwdb`).
//!
//! On a real machine, udev selects one cloud's part of the table by firmware values. Here the test passes that part in
//! the environment variables of `systemd-imdsd(8)`.

use crate::guest::{Guest, NIC};
use crate::inside;
use crate::packages::{Packages, With};
use anyhow::{Context as _, Result, bail, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;

/// The first Debian suite with the client. The client runs with this machine's C library and libcurl.
const SUITE: &str = "forky";
/// The packages of the client, systemd's shared library and the table, and of `systemd-socket-activate`.
const PACKAGES: &[&str] = &["systemd-imds", "libsystemd-shared", "udev", "systemd"];
/// Limit for one request. The client's own limit is 40 s.
const PATIENCE_SECONDS: u32 = 60;
const CLIENT: &str = "usr/lib/systemd/systemd-imdsd";
/// The client's front end, which imports credentials.
const FRONT: &str = "usr/lib/systemd/systemd-imds";
const ACTIVATE: &str = "usr/bin/systemd-socket-activate";
const TABLE: &str = "usr/lib/udev/hwdb.d/40-imds.hwdb";
/// Imports credentials and prints a line for each. `$1` is the root of the packages, the other arguments set the client's
/// environment. The client starts itself from its usual place, and a socket that is activated starts the client.
const IMPORT: &str = r#"
    mount -t tmpfs tmpfs /usr/lib/systemd
    cp "$1/usr/lib/systemd/systemd-imdsd" /usr/lib/systemd/
    root=$1 socket=/run/systemd/io.systemd.InstanceMetadata
    shift
    mkdir -p /run/systemd
    "$ACTIVATE" --accept --fdname=varlink --listen=$socket "$@" /usr/lib/systemd/systemd-imdsd --cache=no >&2 &
    activator=$!
    until [ -S $socket ]; do sleep 0.05; done
    "$root/$FRONT" --import || echo "the import ended with $?" >&2
    kill $activator
    for file in /run/credstore/* /run/credstore.encrypted/*; do
        if [ -f "$file" ]; then echo "$file $(base64 -w0 "$file")"; fi
    done
"#;
/// Prefix of the names of keys in the table.
const KEY: &str = "IMDS_KEY_";

/// The unpacked client.
#[derive(Debug)]
pub struct SystemdImds {
    packages: Packages,
    /// The directory of its shared library.
    libraries: PathBuf,
}

/// One cloud's part of the table.
#[derive(Clone, Debug, Default)]
pub struct Cloud {
    properties: BTreeMap<String, String>,
}

impl Cloud {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.properties.get("IMDS_VENDOR").map_or("", String::as_str)
    }

    /// The names of its keys, as for the client's option `--well-known`, such as `ipv4-public`.
    pub fn keys(&self) -> impl Iterator<Item = String> {
        let names = self.properties.keys().filter_map(|name| name.strip_prefix(KEY));
        names.map(|name| name.to_lowercase().replace('_', "-"))
    }
}

impl SystemdImds {
    /// Returns the client. Skips the test like [`privileged::or_skip`](crate::privileged::or_skip) if privileges or the
    /// packages are missing.
    ///
    /// # Panics
    /// When something is missing and `XDP_IMDS_REQUIRE_PRIVILEGED` is 1.
    #[must_use]
    #[track_caller]
    pub fn or_skip() -> Option<Self> {
        let packages = Packages::or_skip(SUITE, PACKAGES, With::Nothing)?;
        let library = |path: PathBuf| path.join("systemd").is_dir().then(|| path.join("systemd"));
        let below = fs::read_dir(packages.root().join("usr/lib")).expect("an unpacked root");
        let libraries = below.flatten().find_map(|entry| library(entry.path())).expect("a shared library");
        Some(Self { packages, libraries })
    }

    /// Its version.
    #[must_use]
    pub fn version(&self) -> &str {
        self.packages.version("systemd-imds").unwrap_or("unknown")
    }

    /// The clouds of the table.
    ///
    /// # Errors
    /// When the table is missing or has another format.
    pub fn clouds(&self) -> Result<Vec<Cloud>> {
        let path = self.packages.root().join(TABLE);
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let mut clouds: Vec<Cloud> = Vec::new();
        for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let Some(property) = line.strip_prefix(' ') else {
                clouds.push(Cloud::default());
                continue;
            };
            let (name, value) = property.split_once('=').with_context(|| format!("no property: {line}"))?;
            let cloud = clouds.last_mut().with_context(|| format!("a property of no cloud: {line}"))?;
            cloud.properties.insert(name.to_owned(), value.to_owned());
        }
        ensure!(!clouds.is_empty(), "{} names no cloud", path.display());
        Ok(clouds)
    }

    /// Makes the client import credentials. Returns their paths and contents, and what the client said.
    ///
    /// # Errors
    /// When the client cannot run, or the credentials cannot be read.
    pub fn import(&self, guest: &Guest, cloud: &Cloud) -> Result<(BTreeMap<String, Vec<u8>>, String)> {
        let state = tempfile::tempdir()?;
        let root = self.packages.root();
        let mut command = inside::command(state.path(), PATIENCE_SECONDS)?;
        command.args(["sh", "-ec", IMPORT, "sh"]).arg(root);
        command
            .env("LD_LIBRARY_PATH", &self.libraries)
            .env("ACTIVATE", root.join(ACTIVATE))
            .env("FRONT", FRONT);
        command.arg("-E").arg(format!("LD_LIBRARY_PATH={}", self.libraries.display()));
        for (name, value) in &cloud.properties {
            command.args(["-E", &format!("SYSTEMD_{name}={value}")]);
        }
        let output = guest.ns().output(&mut command)?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "the import ended with {}: {}", output.status, said.trim());
        let mut credentials = BTreeMap::new();
        for line in String::from_utf8(output.stdout)?.lines() {
            let (path, content) = line.split_once(' ').with_context(|| format!("no credential: {line}"))?;
            credentials.insert(path.to_owned(), STANDARD.decode(content)?);
        }
        Ok((credentials, said))
    }

    /// Makes the client request a key of a cloud, or the path `below` the key. Returns `None` if the client reports an
    /// error and does not repeat the request. Version 262 treats a 404 as "not found" only if it has no body.
    ///
    /// # Errors
    /// When the client fails in another way, for example without an answer.
    pub fn ask(
        &self,
        guest: &Guest,
        cloud: &Cloud,
        key: &str,
        below: Option<&str>,
    ) -> Result<Option<Vec<u8>>> {
        let state = tempfile::tempdir()?;
        let mut command = inside::command(state.path(), PATIENCE_SECONDS)?;
        command.arg(self.packages.root().join(CLIENT));
        command.args([&format!("--interface={NIC}"), "--cache=no", &format!("--well-known={key}")]);
        command.args(below).env("LD_LIBRARY_PATH", &self.libraries);
        for (name, value) in &cloud.properties {
            command.env(format!("SYSTEMD_{name}"), value);
        }
        let output = guest.ns().output(&mut command)?;
        let said = String::from_utf8_lossy(&output.stderr);
        match (output.status.code(), output.status.signal()) {
            (Some(0), _) => Ok(Some(output.stdout)),
            _ if ["not found.", "State not recoverable"].iter().any(|end| said.contains(end)) => Ok(None),
            _ => bail!("the client ended with {}: {}", output.status, said.trim()),
        }
    }
}
