//! Unmodified releases of cloud-init, unpacked and not installed, and their datasources run inside a guest.
//!
//! `XDP_IMDS_CLOUD_INIT=DIRECTORY` names a checkout of cloud-init to run instead, for measuring. The packages
//! that cloud-init imports are the distribution's, also for a newer release and for a checkout.

use crate::inside;
use crate::netns::{Namespace, run};
use crate::packages::{Packages, With};
use crate::privileged;
use anyhow::{Context as _, Result, bail};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The variable that names a checkout of cloud-init to run instead of the distribution's.
pub const CHECKOUT: &str = shell::variables::CLOUD_INIT;
/// Longest one crawl may take; one without faults takes about a second.
pub const PATIENCE_SECONDS: u32 = 90;
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

/// Debian's suite with the newer cloud-init: the one after the next release, as of Debian 12.
const NEWER_SUITE: &str = "forky";

/// A release of cloud-init.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// The one of this machine's distribution.
    Distribution,
    /// The one of Debian's `forky`, which has datasources that the distribution does not have.
    Newer,
}

/// An unpacked cloud-init.
#[derive(Debug)]
pub struct CloudInit {
    /// `PYTHONPATH`.
    modules: OsString,
    is_newer: bool,
}

/// What a datasource would find on its machine besides the network.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Machine {
    /// Values of the firmware's tables by dmidecode's names, e.g. `system-uuid`.
    pub dmi: BTreeMap<&'static str, String>,
    /// cloud-init's own configuration; `@DIRECTORY@` in it stands for one that goes with the crawl.
    pub config: serde_json::Value,
    /// What a DHCP server would answer, by dhclient's names.
    pub lease: BTreeMap<&'static str, String>,
    /// Files of the image below cloud-init's own directory, by their path there.
    pub files: BTreeMap<&'static str, &'static str>,
}

/// What one crawl brought. Of the fields that say what was found, each is empty when nothing was.
#[derive(Clone, Debug, Deserialize)]
pub struct Crawl {
    /// cloud-init's version, as it prints it.
    pub version: String,
    /// Whether it is newer than the distribution's: [`Release::Newer`], or a [`CHECKOUT`].
    #[serde(default)]
    pub is_newer: bool,
    /// The datasource's class.
    pub datasource: String,
    /// Whether the datasource took what it was told.
    pub found: bool,
    /// What it raised, if it did.
    pub trouble: String,
    /// Seconds from the crawl's start to its end, sleeps included, the interpreter's start not.
    pub seconds: f64,
    /// The whole meta-data.
    #[serde(default)]
    pub metadata: serde_json::Value,
    /// The instance-id as cloud-init would use it.
    #[serde(default)]
    pub instance_id: String,
    /// The short host name as cloud-init would set it.
    #[serde(default)]
    pub hostname: String,
    /// The keys it would give the default user.
    #[serde(default)]
    pub ssh_keys: Vec<String>,
    /// The octets of user-data.
    #[serde(default, deserialize_with = "octets")]
    pub user_data: Vec<u8>,
    /// The octets of vendor-data; as JSON where it is a document.
    #[serde(default, deserialize_with = "octets")]
    pub vendor_data: Vec<u8>,
    /// What the datasource adds to the machine's cloud-config, such as a password.
    #[serde(default)]
    pub own_config: serde_json::Value,
    /// The network configuration it makes, if it makes one.
    #[serde(default)]
    pub network: Option<serde_json::Value>,
    /// Why it could not make one.
    #[serde(default)]
    pub network_trouble: String,
    /// Every sleep, in seconds.
    pub sleeps: Vec<f64>,
    /// Every request, in the order sent.
    pub requests: Vec<Asked>,
    /// What cloud-init logged as a warning or worse.
    pub warnings: Vec<String>,
}

/// One request of a crawl.
#[derive(Clone, Debug, Deserialize)]
pub struct Asked {
    /// Method, host, a port other than 80, and path: `GET 169.254.169.254/v1/meta-data`.
    pub request: String,
    /// The answer's status, 0 when none came.
    pub status: u16,
}

impl CloudInit {
    /// The unpacked cloud-init when the calling test may go on; otherwise it skips as
    /// [`privileged::or_skip`] does, for lack of privilege or of the packages.
    ///
    /// # Panics
    /// When something is missing where no test may skip.
    #[must_use]
    #[track_caller]
    pub fn or_skip(release: Release) -> Option<&'static Self> {
        type Ready = OnceLock<std::result::Result<CloudInit, String>>;
        static DISTRIBUTION: Ready = OnceLock::new();
        static NEWER: Ready = OnceLock::new();
        let ready = match release {
            Release::Distribution => &DISTRIBUTION,
            Release::Newer => &NEWER,
        };
        let ready = ready.get_or_init(|| match privileged::missing() {
            Some(reason) => Err(reason.to_owned()),
            None => {
                Self::get(release).map_err(|error| format!("it cannot get cloud-init's packages: {error:#}"))
            }
        });
        if !privileged::or_skip_for(ready.as_ref().err().map(String::as_str)) {
            return None;
        }
        ready.as_ref().ok()
    }

    /// The modules of a checkout, if there is one, then those of a newer release, then the distribution's.
    fn get(release: Release) -> Result<Self> {
        let checkout = std::env::var_os(CHECKOUT).map(PathBuf::from);
        if let Some(checkout) = &checkout
            && !checkout.join("cloudinit").is_dir()
        {
            bail!("{CHECKOUT} names {}, which holds no cloudinit/", checkout.display());
        }
        let is_newer = checkout.is_some() || release == Release::Newer;
        let newer = match release {
            Release::Distribution => None,
            Release::Newer => {
                Some(Packages::get(NEWER_SUITE, &["cloud-init"], With::Nothing)?.root().join(MODULES))
            }
        };
        let paths = checkout.into_iter().chain(newer).chain([Self::unpack()?.join(MODULES)]);
        Ok(Self { modules: std::env::join_paths(paths)?, is_newer })
    }

    /// Fetches the packages from this machine's apt sources and unpacks them below the target directory,
    /// once for each version.
    ///
    /// # Errors
    /// When apt is missing or has no source, the network is down, or there is no Python.
    fn unpack() -> Result<PathBuf> {
        if !Path::new(PYTHON).exists() {
            bail!("there is no {PYTHON}; `apt-get install python3` brings it");
        }
        let shown = run(Command::new("apt-cache").args(["show", "--no-all-versions", "cloud-init"]))?;
        let version = shown.lines().find_map(|line| line.strip_prefix("Version: "));
        let version = version.context("apt knows no cloud-init; `apt-get update` may help")?;
        let own = std::env::current_exe().context("cannot find the running program's own file")?;
        // target/<profile>/deps/<test>: packages serve every profile.
        let target = own.ancestors().find(|path| path.ends_with("target")).context("not inside target/")?;
        let root = target.join(format!("cloud-init-{version}"));
        if root.is_dir() {
            return Ok(root);
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
        Ok(root)
    }

    /// Runs a datasource inside a guest: its class without the prefix `DataSource`, e.g. `OpenStackLocal`.
    ///
    /// # Errors
    /// When the crawl does not end within [`PATIENCE_SECONDS`] or prints anything but its report. That the
    /// datasource finds nothing, or raises, is in the report.
    pub fn crawl(&self, guest: &Namespace, class: &str, machine: &Machine) -> Result<Crawl> {
        let state = tempfile::tempdir()?;
        let machine = serde_json::to_string(machine)?;
        let mut command = inside::command(state.path(), PATIENCE_SECONDS)?;
        // -S: nothing the machine happens to have installed takes part.
        command.args([PYTHON, "-S", "-B", "-c", CRAWL, class, &machine]).arg(state.path());
        command.env("PYTHONPATH", &self.modules);
        let output = guest.output(&mut command)?;
        let said = String::from_utf8_lossy(&output.stderr);
        if !output.status.success() {
            bail!("the crawl of {class} ended with {}: {}", output.status, said.trim());
        }
        let crawl = serde_json::from_slice(&output.stdout).with_context(|| {
            format!("the crawl printed {} and {}", String::from_utf8_lossy(&output.stdout), said.trim())
        });
        // A checkout does not know its version before it is built.
        crawl.map(|crawl: Crawl| match std::env::var_os(CHECKOUT) {
            Some(_) => Crawl { version: "of a checkout".to_owned(), is_newer: true, ..crawl },
            None => Crawl { is_newer: self.is_newer, ..crawl },
        })
    }
}

impl Asked {
    /// Whether it is of this method and path, whatever the host: `GET /v1/meta-data`.
    #[must_use]
    pub fn is(&self, method_and_path: &str) -> bool {
        let of_path = |(method, rest): (&str, &str)| {
            let path = rest.find('/').map_or("", |start| &rest[start..]);
            method_and_path == format!("{method} {path}")
        };
        self.request.split_once(' ').is_some_and(of_path)
    }
}

impl Crawl {
    /// Seconds slept in all.
    #[must_use]
    pub fn slept(&self) -> f64 {
        // An empty sum would be -0.
        self.sleeps.iter().fold(0.0, |sum, seconds| sum + seconds)
    }
}

fn octets<'de, D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<Vec<u8>, D::Error> {
    let text = String::deserialize(deserializer)?;
    STANDARD.decode(text).map_err(serde::de::Error::custom)
}
