//! Consul, whose JWT auth method trusts the keys that a node publishes.

use super::scene::{ISSUER, Scene};
use anyhow::{Context as _, Result, bail, ensure};
use serde_json::json;
use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use support::eventually::eventually;
use support::guest::Guest;
use support::netns::Namespace;
use support::packages::{Packages, With};

/// The last release of Debian that has Consul.
const SUITE: &str = "bullseye";
/// Audiences that the auth method accepts.
pub(crate) const AUDIENCES: [&str; 2] = ["consul", "consul-again"];
/// The address of Consul's API, which guests reach over their taps: the node's.
const API: &str = "10.0.2.2";
/// The URL at which the node publishes its keys, inside its namespace.
const KEYS: &str = "http://127.0.0.1:9253/.well-known/jwks.json";
/// The operator's token.
const OPERATOR: &str = "0b8bb1a6-6f3c-4b62-a7a5-6d2f44e5a0f1";
/// Limit for the start of Consul, which elects itself first.
const STARTS_WITHIN: Duration = Duration::from_secs(60);
/// How Consul refuses what a role does not allow.
pub(crate) const REFUSED: &str = "Unexpected response code: 403";

/// Consul's program.
pub(crate) struct Program(PathBuf);

impl Program {
    /// Returns Consul of Debian 11. Skips the test like [`Packages::or_skip`].
    #[track_caller]
    pub(crate) fn or_skip() -> Option<Self> {
        let packages = Packages::or_skip(SUITE, &["consul"], With::Nothing)?;
        Some(Self(packages.root().join("usr/bin/consul")))
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.0);
        // Consul does not inherit a proxy or a token.
        command.env_clear().env("HOME", "/nonexistent").stdin(Stdio::null());
        command
    }

    /// Runs a verb, and returns what it prints.
    fn run(&self, ns: &Namespace, words: &[&str], token: Option<&str>) -> Result<String> {
        let mut command = self.command();
        command.args(words).env("CONSUL_HTTP_ADDR", format!("http://{API}:8500"));
        command.envs(token.map(|token| ("CONSUL_HTTP_TOKEN", token)));
        let output = ns.output(&mut command)?;
        if !output.status.success() {
            bail!("{}", String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(String::from_utf8(output.stdout)?.trim_end().to_owned())
    }
}

/// Returns the configuration of the auth method, as JSON.
fn method() -> String {
    let config = json!({
        "JWKSURL": KEYS,
        "BoundIssuer": ISSUER,
        "BoundAudiences": AUDIENCES,
        "ClaimMappings": {"/vm/owner": "owner"},
        // A negative leeway is none.
        "ClockSkewLeeway": -1,
    });
    config.to_string()
}

/// A running Consul on the node. Killed on drop.
pub(crate) struct Consul<'a> {
    program: &'a Program,
    scene: &'a Scene,
    child: Child,
    directory: tempfile::TempDir,
}

impl<'a> Consul<'a> {
    /// Starts Consul, and lets each VM of the scene read the keys below `vm/UUID/` and no others.
    pub(crate) fn start(program: &'a Program, scene: &'a Scene) -> Self {
        Self::try_start(program, scene).expect("Consul starts")
    }

    fn try_start(program: &'a Program, scene: &'a Scene) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let configuration = directory.path().join("consul.hcl");
        let text = format!(
            "acl {{\n  enabled = true\n  default_policy = \"deny\"\n  tokens {{ master = \"{OPERATOR}\" }}\n}}\n\
             connect {{ enabled = false }}\nports {{ dns = -1 grpc = -1 serf_wan = -1 }}\ndisable_update_check = true\n"
        );
        fs::write(&configuration, text)?;
        let log = File::create(directory.path().join("log"))?;
        let mut command = program.command();
        command.args(["agent", "-dev", "-bind", "127.0.0.1", "-client", API, "-config-file"]);
        command.arg(&configuration).stdout(log.try_clone()?).stderr(log);
        let child = scene.node().spawn(&mut command)?;
        let mut consul = Self { program, scene, child, directory };
        eventually(STARTS_WITHIN, || {
            let ended = consul.child.try_wait()?;
            ensure!(ended.is_none(), "it ended: {}", consul.log());
            consul.operator(&["acl", "token", "list"])
        })
        .with_context(|| consul.log())?;
        consul.set_up()?;
        Ok(consul)
    }

    fn log(&self) -> String {
        fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }

    fn set_up(&self) -> Result<()> {
        let config = method();
        self.operator(&["acl", "auth-method", "create", "-name=vms", "-type=jwt", "-config", &config])?;
        for guest in self.scene.guests() {
            let uuid = &guest.identity().instance_id;
            let name = format!("vm-{uuid}");
            let rules = format!("key_prefix \"vm/{uuid}/\" {{ policy = \"read\" }}");
            self.operator(&["acl", "policy", "create", "-name", &name, "-rules", &rules])?;
            self.operator(&["acl", "role", "create", "-name", &name, "-policy-name", &name])?;
            self.operator(&["kv", "put", &secret(guest), &guest.identity().hostname])?;
        }
        let name = "vm-${value.owner}";
        self.operator(&[
            "acl",
            "binding-rule",
            "create",
            "-method=vms",
            "-bind-type=role",
            "-bind-name",
            name,
        ])?;
        Ok(())
    }

    fn operator(&self, words: &[&str]) -> Result<String> {
        self.program.run(self.scene.node(), words, Some(OPERATOR))
    }

    /// Makes Consul fetch the keys again, as an operator does who has revoked one. Otherwise it keeps those it has until
    /// it meets an unknown one, and for five minutes at least.
    pub(crate) fn fetch_keys_again(&self) {
        let words = ["acl", "auth-method", "update", "-name=vms", "-config", &method()];
        self.operator(&words).expect("the auth method is updated");
    }

    /// Logs in from inside a guest with an identity token. Returns Consul's token.
    pub(crate) fn log_in(&self, guest: &Guest, token: &str) -> Result<String> {
        let [bearer, sink] = ["bearer", "sink"].map(|name| self.directory.path().join(name));
        fs::write(&bearer, token)?;
        let [bearer, sink] = [&bearer, &sink].map(|path| path.display().to_string());
        let words = ["login", "-method=vms", "-bearer-token-file", &bearer, "-token-sink-file", &sink];
        self.program.run(guest.ns(), &words, None)?;
        Ok(fs::read_to_string(&sink)?)
    }

    /// Reads a key from inside a guest with a token of Consul.
    pub(crate) fn read(&self, guest: &Guest, token: &str, key: &str) -> Result<String> {
        self.program.run(guest.ns(), &["kv", "get", key], Some(token))
    }
}

impl Drop for Consul<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.child.kill().and_then(|()| self.child.wait()) {
            eprintln!("cannot end Consul {}: {error}", self.child.id());
        }
    }
}

/// The key that only this guest may read. Its value is the guest's name.
pub(crate) fn secret(guest: &Guest) -> String {
    format!("vm/{}/secret", guest.identity().instance_id)
}
