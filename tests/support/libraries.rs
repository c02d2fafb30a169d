//! Client libraries from the Python package registry. They are installed in the target directory and run inside a
//! guest.

use crate::inside;
use crate::netns::Namespace;
use crate::privileged;
use anyhow::{Context as _, Result, bail};
use std::path::PathBuf;
use std::sync::OnceLock;
use testbed::wheels::{self, PYTHON};

/// Limit for one script.
pub const PATIENCE_SECONDS: u32 = 60;
/// Releases and the hashes of their files.
const REQUIREMENTS: &str = include_str!("../clients/requirements.txt");

/// Installed libraries.
#[derive(Debug)]
pub struct Libraries {
    root: PathBuf,
}

impl Libraries {
    /// Returns the libraries. Skips the test like [`privileged::or_skip`] if privileges, pip or the registry are
    /// missing.
    ///
    /// # Panics
    /// When something is missing and `XDP_IMDS_REQUIRE_PRIVILEGED` is 1.
    #[must_use]
    #[track_caller]
    pub fn or_skip() -> Option<&'static Self> {
        static READY: OnceLock<std::result::Result<Libraries, String>> = OnceLock::new();
        let ready = READY.get_or_init(|| match privileged::missing() {
            Some(reason) => Err(reason.to_owned()),
            None => Self::install().map_err(|error| format!("it cannot get client libraries: {error:#}")),
        });
        let missing = ready.as_ref().err().map(String::as_str);
        if !privileged::or_skip_for(missing) {
            return None;
        }
        ready.as_ref().ok()
    }

    /// Installs the releases named in the requirements, once for each change of the requirements.
    ///
    /// # Errors
    /// When Python or pip is missing, the registry is out of reach, or a file does not have its hash.
    fn install() -> Result<Self> {
        let own = std::env::current_exe().context("cannot find the running program's own file")?;
        // `own` is target/<profile>/deps/<test>. All profiles share the libraries.
        let target = own.ancestors().find(|path| path.ends_with("target")).context("not inside target/")?;
        let root = wheels::install(REQUIREMENTS, target, "client-libraries")?;
        Ok(Self { root })
    }

    /// Runs a script inside a guest. Returns the JSON document that it prints.
    ///
    /// # Errors
    /// When the script raises an exception, does not end within [`PATIENCE_SECONDS`], or prints anything else.
    pub fn run(&self, guest: &Namespace, script: &str) -> Result<serde_json::Value> {
        let state = tempfile::tempdir()?;
        let mut command = inside::command(state.path(), PATIENCE_SECONDS)?;
        // -S ignores the packages installed on this machine.
        command.args([PYTHON, "-S", "-B", "-c", script]).env("PYTHONPATH", &self.root);
        let output = guest.output(&mut command)?;
        let said = String::from_utf8_lossy(&output.stderr);
        if !output.status.success() {
            bail!("the client ended with {}: {}", output.status, said.trim());
        }
        serde_json::from_slice(&output.stdout).with_context(|| {
            format!("the client printed {} and {}", String::from_utf8_lossy(&output.stdout), said.trim())
        })
    }
}
