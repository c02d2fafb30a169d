//! Nova's own metadata API, over databases of its own, as `nova_api.py` sets it up.

use std::cell::RefCell;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use support::guest::{Fetched, curl_in};
use support::inside::{Libraries, LibraryList};
use support::netns::{Namespace, run};

use super::{Instance, PATIENCE};

/// `metadata_proxy_shared_secret`.
pub(super) const SECRET: &str = "s3cr3t";
/// Whom the agent asks for to learn whether Nova is there.
const NOBODY: &str = "00000000-0000-0000-0000-000000000000";
pub(super) const URL: &str = "http://127.0.0.1:8775";
static LIBRARIES: LibraryList = LibraryList::new("nova", include_str!("requirements.txt"));

/// The service. It ends with the test.
pub(super) struct Nova {
    libraries: &'static Libraries,
    room: tempfile::TempDir,
    server: RefCell<Option<NovaProcess>>,
}

struct NovaProcess {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Nova {
    /// A Nova that is not started yet.
    pub(super) fn or_skip() -> Option<Self> {
        let libraries = LIBRARIES.or_skip()?;
        Some(Self { libraries, room: tempfile::tempdir().expect("a directory"), server: RefCell::default() })
    }

    /// Starts it in a namespace, with the databases that it had before.
    pub(super) fn start(&self, ns: &Namespace) -> Result<()> {
        let log = fs::File::create(self.room.path().join("log"))?;
        let mut command = self.libraries.python();
        command.args(["-c", include_str!("nova_api.py")]).arg(self.room.path()).env("LC_ALL", "C.UTF-8");
        command.env_remove("PYTHONDONTWRITEBYTECODE").stderr(log);
        let mut child = ns.spawn(command.stdin(Stdio::piped()).stdout(Stdio::piped()))?;
        let orders = child.stdin.take().context("standard input is piped")?;
        let answers = BufReader::new(child.stdout.take().context("standard output is piped")?);
        let mut server = self.server.borrow_mut();
        server.insert(NovaProcess { child, orders, answers }).has_said("serving").with_context(|| self.log())
    }

    pub(super) fn stop(&self) {
        *self.server.borrow_mut() = None;
    }

    /// Stores an instance.
    pub(super) fn add(&self, instance: &Instance) -> Result<()> {
        let Instance { identity, port, project, .. } = instance;
        let line = json!({
            "uuid": identity.instance_id, "project": project, "hostname": identity.hostname,
            "ssh_key": identity.ssh_key, "user_data": identity.user_data,
            "port": {"id": port, "mac": identity.mac.to_string(), "address": identity.address.to_string()},
        });
        let mut server = self.server.borrow_mut();
        let server = server.as_mut().context("Nova is not started")?;
        writeln!(server.orders, "{line}")?;
        server.has_said("stored").with_context(|| self.log())
    }

    fn log(&self) -> String {
        fs::read_to_string(self.room.path().join("log")).unwrap_or_default()
    }

    /// Has curl ask as Neutron's agents do for an instance.
    pub(super) fn ask(ns: &Namespace, instance: &Instance, words: &[&str], path: &str) -> Result<Fetched> {
        let Instance { identity, project, .. } = instance;
        let id = &identity.instance_id;
        let fields = [
            format!("-HX-Instance-ID: {id}"),
            format!("-HX-Tenant-ID: {project}"),
            format!("-HX-Instance-ID-Signature: {}", signature(id)?),
            format!("-HX-Forwarded-For: {}", identity.address),
            format!("{URL}{path}"),
        ];
        let words: Vec<_> = words.iter().copied().chain(fields.iter().map(String::as_str)).collect();
        curl_in(ns, &words, PATIENCE)
    }

    /// The requests of the agent for instances so far. curl's have more fields, and some ask only whether Nova is there.
    pub(super) fn requests(&self) -> Result<Vec<Value>> {
        let text = fs::read_to_string(self.room.path().join("requests"))?;
        let all: Result<Vec<Value>, _> = text.lines().map(serde_json::from_str).collect();
        let is_for_one = |fields: &Value| fields["ACCEPT"].is_null() && fields["X_TENANT_ID"] != NOBODY;
        Ok(all?.into_iter().filter(|request| is_for_one(&request["fields"])).collect())
    }
}

impl NovaProcess {
    fn has_said(&mut self, word: &str) -> Result<()> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        ensure!(line.trim() == word, "Nova said {line:?} instead of {word:?}");
        Ok(())
    }
}

impl Drop for NovaProcess {
    fn drop(&mut self) {
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

/// `hmac.new(secret, instance_id, hashlib.sha256).hexdigest()`, by openssl(1) and not by the agent's code.
fn signature(instance: &str) -> Result<String> {
    let script = format!("printf %s {instance:?} | openssl dgst -sha256 -hmac {SECRET}");
    let text = run(Command::new("sh").args(["-c", &script]))?;
    Ok(text.trim().rsplit(' ').next().unwrap_or_default().to_owned())
}
