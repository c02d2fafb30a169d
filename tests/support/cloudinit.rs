//! Unmodified releases of cloud-init. They are unpacked but not installed. Their datasources run inside a guest.
//!
//! `XDP_IMDS_CLOUD_INIT=DIRECTORY` selects a checkout of cloud-init instead, for measurements. The Python packages
//! that cloud-init imports always come from the distribution.

use crate::netns::{Namespace, run};
use crate::packages::{Packages, With};
use crate::{inside, privileged};
use anyhow::{Context as _, Result, bail};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;

/// The variable that names a checkout of cloud-init to run instead of a release.
pub const CHECKOUT: &str = shell::variables::CLOUD_INIT;
/// Limit for one crawl. A crawl without faults takes about a second.
pub const PATIENCE_SECONDS: u32 = 90;
/// Limit for the rendering of all documents by one release. It takes ten seconds on an idle machine.
const RENDERING_SECONDS: u32 = 300;
/// The interpreter for which the packages were built. Another version, earlier in PATH, would not load their modules.
const PYTHON: &str = "/usr/bin/python3";
/// Directory of the Python modules in Debian's packages.
const MODULES: &str = "usr/lib/python3/dist-packages";
const CRAWL: &str = include_str!("../cloudinit/crawl.py");
/// The script that renders network documents, with its modules.
const RENDER: [(&str, &str); 3] = [
    ("render.py", include_str!("../cloudinit/network/render.py")),
    ("clients.py", include_str!("../cloudinit/network/clients.py")),
    ("meaning.py", include_str!("../cloudinit/network/meaning.py")),
];
/// cloud-init and the Python packages that its datasources import.
const PACKAGES: &str = "\
    cloud-init python3-attr python3-certifi python3-chardet python3-charset-normalizer python3-configobj \
    python3-idna python3-jinja2 python3-json-pointer python3-jsonpatch python3-jsonschema \
    python3-markupsafe python3-netifaces python3-oauthlib python3-pyrsistent python3-requests \
    python3-serial python3-six python3-urllib3 python3-yaml";

/// The Debian suite with the newer cloud-init: Debian 14.
const NEWER_SUITE: &str = "forky";

/// A release of cloud-init.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// The release in this machine's distribution.
    Distribution,
    /// The release in Debian's `forky`. It has datasources that the distribution does not have.
    Newer,
}

/// An unpacked cloud-init.
#[derive(Debug)]
pub struct CloudInit {
    /// `PYTHONPATH`.
    modules: OsString,
    is_newer: bool,
}

/// Properties of a machine that a datasource reads, apart from the network.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Machine {
    /// Firmware values by dmidecode's names, e.g. `system-uuid`.
    pub dmi: BTreeMap<&'static str, String>,
    /// cloud-init's own configuration. `@DIRECTORY@` in it stands for a directory that is removed after the crawl.
    pub config: serde_json::Value,
    /// The DHCP lease, by dhclient's names.
    pub lease: BTreeMap<&'static str, String>,
    /// Files of the image, by their paths below cloud-init's own directory.
    pub files: BTreeMap<&'static str, &'static str>,
}

/// The result of one crawl. If the datasource finds nothing, all fields of its content are empty.
#[derive(Clone, Debug, Deserialize)]
pub struct Crawl {
    /// cloud-init's version, as it prints it.
    pub version: String,
    /// True for [`Release::Newer`] and for a [`CHECKOUT`].
    #[serde(default)]
    pub is_newer: bool,
    /// The datasource's class.
    pub datasource: String,
    /// Whether the datasource accepted the service's answers.
    pub found: bool,
    /// The exception that the datasource raised, or an empty string.
    pub trouble: String,
    /// Duration in seconds, including sleeps, excluding the start of the interpreter.
    pub seconds: f64,
    /// The whole meta-data.
    #[serde(default)]
    pub metadata: serde_json::Value,
    /// The instance-id that cloud-init would use.
    #[serde(default)]
    pub instance_id: String,
    /// The short host name that cloud-init would set.
    #[serde(default)]
    pub hostname: String,
    /// The keys that cloud-init would give the default user.
    #[serde(default)]
    pub ssh_keys: Vec<String>,
    /// The bytes of user-data.
    #[serde(default, deserialize_with = "bytes")]
    pub user_data: Vec<u8>,
    /// The bytes of vendor-data; JSON if it is a map or a list.
    #[serde(default, deserialize_with = "bytes")]
    pub vendor_data: Vec<u8>,
    /// Cloud-config that the datasource adds to the machine's, such as a password.
    #[serde(default)]
    pub own_config: serde_json::Value,
    /// The network configuration that the datasource makes, if any.
    #[serde(default)]
    pub network: Option<serde_json::Value>,
    /// The exception that the datasource raised instead of a network configuration, or an empty string.
    #[serde(default)]
    pub network_trouble: String,
    /// Every sleep, in seconds.
    pub sleeps: Vec<f64>,
    /// Every request, in the order sent.
    pub requests: Vec<Asked>,
    /// cloud-init's log messages of level warning and above.
    pub warnings: Vec<String>,
}

/// What cloud-init rendered.
#[derive(Clone, Debug)]
pub struct Rendering {
    /// cloud-init's version, as it prints it.
    pub version: String,
    /// One list for each case, with an outcome for each renderer.
    pub outcomes: Vec<serde_json::Value>,
}

/// One request of a crawl.
#[derive(Clone, Debug, Deserialize)]
pub struct Asked {
    /// Method, host, a port other than 80, and path: `GET 169.254.169.254/v1/meta-data`.
    pub request: String,
    /// The answer's status; 0 without an answer.
    pub status: u16,
}

impl CloudInit {
    /// Returns the unpacked cloud-init. Skips the test like [`privileged::or_skip`] if privileges or the packages are
    /// missing.
    ///
    /// # Panics
    /// When something is missing and `XDP_IMDS_REQUIRE_PRIVILEGED` is 1.
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

    /// Searches modules in the checkout if there is one, then in the newer release if wanted, then in the distribution.
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

    /// Returns the cloud-init of a Debian suite, with the Python packages of the distribution. Skips the test like
    /// [`CloudInit::or_skip`].
    ///
    /// # Panics
    /// When something is missing and `XDP_IMDS_REQUIRE_PRIVILEGED` is 1.
    #[must_use]
    #[track_caller]
    pub fn of_or_skip(suite: &str) -> Option<Self> {
        let ready = match privileged::missing() {
            Some(reason) => Err(reason.to_owned()),
            None => {
                Self::of(suite).map_err(|error| format!("it cannot get cloud-init of {suite}: {error:#}"))
            }
        };
        privileged::or_skip_for(ready.as_ref().err().map(String::as_str)).then(|| ready.ok())?
    }

    fn of(suite: &str) -> Result<Self> {
        let own = match std::env::var_os(CHECKOUT) {
            Some(checkout) => PathBuf::from(checkout),
            None => Packages::get(suite, &["cloud-init"], With::Nothing)?.root().join(MODULES),
        };
        let modules = std::env::join_paths([own, Self::unpack()?.join(MODULES)])?;
        Ok(Self { modules, is_newer: false })
    }

    /// cloud-init's version, as it prints it.
    ///
    /// # Errors
    /// When it does not run.
    pub fn version(&self) -> Result<String> {
        let nothing = serde_json::json!({ "renderers": [], "cases": [] });
        Ok(self.render(&nothing)?.version)
    }

    /// Renders network documents and reads what comes out, as `render.py` describes.
    ///
    /// # Errors
    /// When the script fails or has no outcome for each document.
    pub fn render(&self, asked: &serde_json::Value) -> Result<Rendering> {
        let state = tempfile::tempdir()?;
        for (name, text) in RENDER {
            fs::write(state.path().join(name), text)?;
        }
        let questions = state.path().join("asked.json");
        fs::write(&questions, asked.to_string())?;
        let mut command = inside::command(state.path(), RENDERING_SECONDS)?;
        command.args([PYTHON, "-S", "-B"]).arg(state.path().join("render.py")).arg(questions);
        command.env("PYTHONPATH", &self.modules).env("TMPDIR", state.path());
        // The devices of this machine do not exist there.
        let output = Namespace::new("renderers")?.output(&mut command)?;
        let said = String::from_utf8_lossy(&output.stderr);
        if !output.status.success() {
            bail!("rendering ended with {}: {}", output.status, said.trim());
        }
        let text = String::from_utf8(output.stdout).context("the report is not text")?;
        let mut lines = text.lines();
        let version = serde_json::from_str(lines.next().context("no version")?)?;
        let outcomes = lines.map(serde_json::from_str).collect::<std::result::Result<Vec<_>, _>>()?;
        let wanted = asked["cases"].as_array().map_or(0, Vec::len);
        if outcomes.len() != wanted {
            bail!("{} outcomes instead of {wanted}: {}", outcomes.len(), said.trim());
        }
        Ok(Rendering { version, outcomes })
    }

    /// Downloads the packages from this machine's apt sources and unpacks them below the target directory, once for
    /// each version.
    ///
    /// # Errors
    /// When apt is missing or has no source, the network is down, or there is no Python.
    fn unpack() -> Result<PathBuf> {
        if !Path::new(PYTHON).exists() {
            bail!("there is no {PYTHON}; `apt-get install python3` installs it");
        }
        let shown = run(Command::new("apt-cache").args(["show", "--no-all-versions", "cloud-init"]))?;
        let version = shown.lines().find_map(|line| line.strip_prefix("Version: "));
        let version = version.context("apt knows no cloud-init; `apt-get update` may help")?;
        let own = std::env::current_exe().context("cannot find the running program's own file")?;
        // `own` is target/<profile>/deps/<test>. All profiles share the packages.
        let target = own.ancestors().find(|path| path.ends_with("target")).context("not inside target/")?;
        let root = target.join(format!("cloud-init-{version}"));
        if root.is_dir() {
            return Ok(root);
        }
        let aside = tempfile::tempdir_in(target).context("cannot unpack below target/")?;
        let mut download = Command::new("apt-get");
        // As root, apt would change to a user without permission to write here.
        download.args(["download", "--quiet", "-o", "APT::Sandbox::User=root"]).args(PACKAGES.split(' '));
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
            // The error counts only if no other test program has unpacked them in the meantime.
            return Err(error).with_context(|| format!("cannot put {} in place", root.display()));
        }
        Ok(root)
    }

    /// Runs a datasource inside a guest. `class` is its class without the prefix `DataSource`, e.g. `OpenStackLocal`.
    ///
    /// # Errors
    /// When the crawl does not end within [`PATIENCE_SECONDS`] or prints anything but its report. If the datasource
    /// finds nothing or raises an exception, this is part of the report and no error.
    pub fn crawl(&self, guest: &Namespace, class: &str, machine: &Machine) -> Result<Crawl> {
        let state = tempfile::tempdir()?;
        let machine = serde_json::to_string(machine)?;
        let mut command = inside::command(state.path(), PATIENCE_SECONDS)?;
        // -S ignores the packages installed on this machine.
        command.args([PYTHON, "-S", "-B", "-c", CRAWL, class, &machine]).arg(state.path());
        command.env("PYTHONPATH", &self.modules);
        let output = guest.output(&mut command)?;
        let said = String::from_utf8_lossy(&output.stderr);
        if !output.status.success() {
            bail!("the crawl of {class} ended with {}: {}", output.status, said.trim());
        }
        self.read(&output.stdout).with_context(|| said.trim().to_owned())
    }

    /// Reads a report of `crawl.py`.
    fn read(&self, report: &[u8]) -> Result<Crawl> {
        let crawl = serde_json::from_slice(report);
        let crawl: Crawl =
            crawl.with_context(|| format!("the crawl printed {}", String::from_utf8_lossy(report)))?;
        // A checkout has no version until it is built.
        Ok(match std::env::var_os(CHECKOUT) {
            Some(_) => Crawl { version: "of a checkout".to_owned(), is_newer: true, ..crawl },
            None => Crawl { is_newer: self.is_newer, ..crawl },
        })
    }

    /// Starts an interpreter that crawls again and again inside a namespace, for at most `seconds` in all.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn crawler(&self, guest: &Namespace, seconds: u32) -> Result<Crawler<'_>> {
        let state = tempfile::tempdir()?;
        let mut command = inside::command(state.path(), seconds)?;
        command.args([PYTHON, "-S", "-B", "-c", CRAWL]).arg(state.path());
        command.env("PYTHONPATH", &self.modules).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = guest.spawn(&mut command)?;
        let questions = child.stdin.take();
        let reports = BufReader::new(child.stdout.take().context("standard output is piped")?);
        Ok(Crawler { of: self, child, questions, reports, _state: state })
    }
}

/// An interpreter that has loaded cloud-init once. Each of its crawls is a process of its own.
#[derive(Debug)]
pub struct Crawler<'a> {
    of: &'a CloudInit,
    child: Child,
    questions: Option<ChildStdin>,
    reports: BufReader<ChildStdout>,
    _state: tempfile::TempDir,
}

impl Crawler<'_> {
    /// Like [`CloudInit::crawl`], on what is in the namespace now.
    ///
    /// # Errors
    /// When the crawl raises an exception that is not the datasource's, or the interpreter's time is over.
    pub fn crawl(&mut self, class: &str, machine: &Machine) -> Result<Crawl> {
        let line = serde_json::to_string(&(class, machine))?;
        writeln!(self.questions.as_mut().context("standard input is open")?, "{line}")?;
        let mut report = String::new();
        self.reports.read_line(&mut report)?;
        self.of.read(report.as_bytes()).with_context(|| format!("the crawl of {class}"))
    }
}

impl Drop for Crawler<'_> {
    fn drop(&mut self) {
        // It ends at the end of its input.
        drop(self.questions.take());
        if let Err(error) = self.child.wait() {
            eprintln!("cannot wait for the crawler {}: {error}", self.child.id());
        }
    }
}

impl Asked {
    /// Whether the request has this method and path, such as `GET /v1/meta-data`. The host does not matter.
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
    /// Total of all sleeps, in seconds.
    #[must_use]
    pub fn slept(&self) -> f64 {
        // An empty sum would be -0.
        self.sleeps.iter().fold(0.0, |sum, seconds| sum + seconds)
    }
}

fn bytes<'de, D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<Vec<u8>, D::Error> {
    let text = String::deserialize(deserializer)?;
    STANDARD.decode(text).map_err(serde::de::Error::custom)
}
