//! The unmodified cloud-init of this machine's distribution, unpacked and not installed, and its NoCloud
//! datasource run inside a guest.

use crate::netns::{Namespace, run};
use crate::privileged;
use anyhow::{Context as _, Result, bail};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Longest one crawl may take; a seed without faults takes about a second.
pub const PATIENCE_SECONDS: u32 = 120;
/// The interpreter the packages were built for: a newer one first on PATH would not load their modules.
const PYTHON: &str = "/usr/bin/python3";
/// Where Debian's packages put Python modules.
const MODULES: &str = "usr/lib/python3/dist-packages";
const CRAWL: &str = include_str!("../cloudinit/crawl.py");
/// cloud-init and every Python package it imports on its way to a datasource.
const PACKAGES: &[&str] = &[
    "cloud-init",
    "python3-attr",
    "python3-certifi",
    "python3-chardet",
    "python3-charset-normalizer",
    "python3-configobj",
    "python3-idna",
    "python3-jinja2",
    "python3-json-pointer",
    "python3-jsonpatch",
    "python3-jsonschema",
    "python3-markupsafe",
    "python3-netifaces",
    "python3-oauthlib",
    "python3-pyrsistent",
    "python3-requests",
    "python3-serial",
    "python3-six",
    "python3-urllib3",
    "python3-yaml",
];

/// An unpacked cloud-init.
#[derive(Debug)]
pub struct CloudInit {
    root: PathBuf,
}

/// What one crawl of a seed brought.
#[derive(Clone, Debug, Deserialize)]
pub struct Crawl {
    /// cloud-init's version, as it prints it.
    pub version: String,
    /// Whether the datasource took the seed.
    pub found: bool,
    /// The datasource's class.
    pub datasource: String,
    /// The whole meta-data.
    pub metadata: serde_json::Value,
    /// The instance-id as cloud-init would use it.
    pub instance_id: String,
    /// The short host name as cloud-init would set it.
    pub hostname: String,
    /// The keys it would give the default user.
    pub ssh_keys: Vec<String>,
    /// The octets of user-data.
    #[serde(deserialize_with = "octets")]
    pub user_data: Vec<u8>,
    /// The octets of vendor-data.
    #[serde(deserialize_with = "octets")]
    pub vendor_data: Vec<u8>,
    /// Every sleep, in seconds.
    pub sleeps: Vec<f64>,
    /// Every request, `GET /v1/meta-data`.
    pub requests: Vec<String>,
}

impl CloudInit {
    /// The unpacked cloud-init when the calling test may go on; otherwise it skips as
    /// [`privileged::or_skip`] does, for lack of privilege or of the packages.
    ///
    /// # Panics
    /// When something is missing where no test may skip.
    #[must_use]
    #[track_caller]
    pub fn or_skip() -> Option<&'static Self> {
        static READY: OnceLock<std::result::Result<CloudInit, String>> = OnceLock::new();
        let ready = READY.get_or_init(|| match privileged::missing() {
            Some(reason) => Err(reason.to_owned()),
            None => Self::unpack().map_err(|error| format!("it cannot get cloud-init's packages: {error:#}")),
        });
        let missing = ready.as_ref().err().map(String::as_str);
        if !privileged::or_skip_for(missing) {
            return None;
        }
        ready.as_ref().ok()
    }

    /// Fetches the packages from this machine's apt sources and unpacks them below the target directory,
    /// once for each version.
    ///
    /// # Errors
    /// When apt is missing or has no source, the network is down, or there is no Python.
    fn unpack() -> Result<Self> {
        if !Path::new(PYTHON).exists() {
            bail!("there is no {PYTHON}; `apt-get install python3-minimal` brings it");
        }
        let shown = run(Command::new("apt-cache").args(["show", "--no-all-versions", "cloud-init"]))?;
        let version = shown.lines().find_map(|line| line.strip_prefix("Version: "));
        let version = version.context("apt knows no cloud-init; `apt-get update` may help")?;
        let own = std::env::current_exe().context("cannot find the running program's own file")?;
        // target/<profile>/deps/<test>: packages serve every profile.
        let target = own.ancestors().find(|path| path.ends_with("target")).context("not inside target/")?;
        let root = target.join(format!("cloud-init-{version}"));
        if root.is_dir() {
            return Ok(Self { root });
        }
        let aside = tempfile::tempdir_in(target).context("cannot unpack below target/")?;
        let mut download = Command::new("apt-get");
        // As root, apt would drop to a user that may not write here.
        download.args(["download", "--quiet", "-o", "APT::Sandbox::User=root"]).args(PACKAGES);
        run(download.current_dir(aside.path()))?;
        let tree = aside.path().join("tree");
        for entry in fs::read_dir(aside.path())? {
            let package = entry?.path();
            if package.extension().is_some_and(|extension| extension == "deb") {
                run(Command::new("dpkg-deb").arg("--extract").args([&package, &tree]))?;
            }
        }
        if let Err(error) = fs::rename(&tree, &root)
            && !root.is_dir()
        {
            // Not merely another test program that was quicker.
            return Err(error).with_context(|| format!("cannot put {} in place", root.display()));
        }
        Ok(Self { root })
    }

    /// Runs the NoCloud datasource inside a guest on this seed, a URL that ends in `/`.
    ///
    /// # Errors
    /// When the datasource raises, does not end within [`PATIENCE_SECONDS`], or prints anything else.
    pub fn crawl(&self, guest: &Namespace, seed: &str) -> Result<Crawl> {
        let state = tempfile::tempdir()?;
        let mut command = Command::new("timeout");
        // -S: nothing the machine happens to have installed takes part.
        command.args([&PATIENCE_SECONDS.to_string(), PYTHON, "-S", "-B", "-c", CRAWL, seed]);
        command.arg(state.path());
        // An environment of its own: no proxy, no other modules, no locale of the machine's.
        command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        command.env("PYTHONPATH", self.root.join(MODULES)).env("LC_ALL", "C.UTF-8");
        let output = guest.output(&mut command)?;
        let said = String::from_utf8_lossy(&output.stderr);
        if !output.status.success() {
            bail!("the datasource's crawl ended with {}: {}", output.status, said.trim());
        }
        serde_json::from_slice(&output.stdout).with_context(|| {
            format!("the crawl printed {} and {}", String::from_utf8_lossy(&output.stdout), said.trim())
        })
    }
}

impl Crawl {
    /// Seconds slept in all.
    #[must_use]
    pub fn slept(&self) -> f64 {
        self.sleeps.iter().sum()
    }
}

fn octets<'de, D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<Vec<u8>, D::Error> {
    let text = String::deserialize(deserializer)?;
    STANDARD.decode(text).map_err(serde::de::Error::custom)
}
