//! Consul, whose JWT auth method trusts the keys that a node publishes.

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use support::agent::{self, Agent};
use support::eventually;
use support::guest::{Guest, METADATA};
use support::inside::Libraries;
use support::netns::Namespace;
use support::packages::{Packages, With};
use support::privileged;

use super::OLD;
use super::scene::{AUDIENCE, ISSUER, PATIENCE, Scene, make_key, part, with_input};

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

// Azure's identity library, unmodified, gets a VM's token, which a JOSE library verifies.

/// The audience of `tests/clients/azure.py`.
const RESOURCE: &str = "https://management.azure.com";
const CLIENT: &str = "3f0c4a2e-7f0a-4a4c-9d43-0c8f4b7a1d11";

#[test]
fn azures_library_gets_a_vms_token_of_the_nodes_issuer() {
    let Some(libraries) = Libraries::or_skip() else { return };
    let scene = Scene::new();
    make_key(&scene.keys().join(OLD), "RS256");
    let agent = scene.lasting_agent("algorithm: RS256, trust_domain: lab.example");
    scene.change_record(0, |record| {
        record["credentials"]["managed_identity"] = json!({ "client_id": CLIENT });
    });
    let guest = &scene.guests()[0];
    let url = format!("http://{METADATA}/metadata/identity/oauth2/token?api-version=2018-02-01&resource=x");
    eventually(PATIENCE, || {
        let answer = guest.curl(&["-H", "Metadata: true", &url], PATIENCE)?;
        anyhow::ensure!(answer.status == 200, "{}: {}", answer.status, answer.text());
        Ok(())
    })
    .expect("the record has an identity");
    let found = libraries.run(guest.ns(), include_str!("../azure.py")).expect("the client answers");
    let token = found["token"].as_str().expect("a token").to_owned();
    let verified = scene.verify(libraries, &agent, &[(&token, RESOURCE), (&token, "another")]);
    let subject = format!("spiffe://lab.example/vm/{}", guest.identity().instance_id);
    assert_eq!(
        (&verified[0]["sub"], &verified[0]["appid"]),
        (&json!(subject), &json!(CLIENT)),
        "{verified:?}"
    );
    assert_eq!(verified[1], json!("InvalidAudienceError"));
}

// Google's auth library, unmodified, fetches a VM's token and verifies it.

const EMAIL: &str = "web@lab.example";

/// Gives the VM an account without a token, and waits until the guest sees it.
fn give_account(scene: &Scene) {
    scene.change_record(0, |record| {
        record["credentials"]["service_account"] = json!({"name": "web", "email": EMAIL});
    });
    let url = "http://169.254.169.254/computeMetadata/v1/instance/service-accounts/default/email";
    eventually(PATIENCE, || {
        let email = scene.guests()[0].curl(&["-H", "Metadata-Flavor: Google", url], PATIENCE)?;
        anyhow::ensure!(email.text() == EMAIL, "{}: {}", email.status, email.text());
        Ok(())
    })
    .expect("the record has an account");
}

#[test]
fn googles_library_fetches_a_vms_identity_token_and_verifies_it() {
    let Some(libraries) = Libraries::or_skip() else { return };
    for algorithm in ["ES256", "RS256"] {
        let scene = Scene::new();
        make_key(&scene.keys().join(OLD), algorithm);
        let _agent = scene.lasting_agent(&format!("algorithm: {algorithm}, trust_domain: lab.example"));
        give_account(&scene);
        let guest = &scene.guests()[0];
        let script = with_input(&json!({ "audience": AUDIENCE }), include_str!("../google_identity.py"));
        let token = libraries.run(guest.ns(), &script).expect("the client gets a token");

        let input = json!({ "token": token, "audiences": [AUDIENCE, "another"], "keys": KEYS });
        let script = with_input(&input, include_str!("../google_verifier.py"));
        let found = libraries.run(scene.node(), &script).expect("the verifier answers");
        let claims = &found[0];
        let subject = format!("spiffe://lab.example/vm/{}", guest.identity().instance_id);
        let expected = [
            ("iss", json!(ISSUER)),
            ("aud", json!(AUDIENCE)),
            ("sub", json!(subject)),
            ("email", json!(EMAIL)),
            ("email_verified", Value::Bool(true)),
        ];
        for (claim, value) in expected {
            assert_eq!(claims[claim], value, "{algorithm}: {claim} of {claims}");
        }
        assert_eq!(claims["google"]["compute_engine"]["instance_name"], json!(guest.identity().hostname));
        assert_eq!(found[1], json!("InvalidAudienceError"), "{algorithm}");
    }
}

// With a trust domain, a VM's token is a JWT-SVID to SPIFFE's own library.

const DOMAIN: &str = "lab.example";

/// Runs `identity jwks --spiffe` on the keys that a node publishes. Returns its output, or its error.
fn bundle(scene: &Scene, agent: &Agent<'_>) -> Result<Value, String> {
    let set = scene.keys().join("jwks.json");
    fs::write(&set, scene.published(agent).to_string()).expect("written");
    let mut command = Command::new(agent::binary().expect("the agent is built"));
    let output = command.args(["identity", "jwks", "--spiffe"]).arg(&set).output().expect("the verb runs");
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    Ok(serde_json::from_slice(&output.stdout).expect("JSON"))
}

#[test]
fn a_vms_token_is_a_jwt_svid_of_its_trust_domain_only() {
    let Some(libraries) = Libraries::or_skip() else { return };
    for algorithm in ["ES256", "RS256"] {
        let scene = Scene::new();
        make_key(&scene.keys().join(OLD), algorithm);
        let agent = scene.lasting_agent(&format!("algorithm: {algorithm}, trust_domain: {DOMAIN}"));
        scene.change_record(1, |record| record["identity"] = json!({"subject": "ns/{project}/vm/{name}"}));
        let named = format!("spiffe://{DOMAIN}/ns/lab/vm/{}", scene.guests()[1].identity().hostname);
        let by_name = eventually(PATIENCE, || {
            let token = scene.token(1, AUDIENCE);
            let subject = &part(&token, 1)["sub"];
            anyhow::ensure!(*subject == json!(named), "{subject}");
            Ok(token)
        });
        let (by_uuid, by_name) = (scene.token(0, AUDIENCE), by_name.expect("the record sets the subject"));

        let bundle = bundle(&scene, &agent).expect("a bundle");
        assert_eq!(bundle["keys"][0]["use"], json!("jwt-svid"), "{bundle}");
        let asked = [
            (DOMAIN, &by_uuid, AUDIENCE),
            (DOMAIN, &by_name, AUDIENCE),
            ("other.example", &by_uuid, AUDIENCE),
            (DOMAIN, &by_uuid, "another"),
        ];
        let script =
            with_input(&json!({ "bundle": bundle, "asked": asked }), include_str!("../spiffe_verifier.py"));
        let found = libraries.run(scene.node(), &script).expect("the verifier answers");
        let uuid = format!("spiffe://{DOMAIN}/vm/{}", scene.guests()[0].identity().instance_id);
        assert_eq!(found, json!([uuid, named, "InvalidTokenError", "InvalidTokenError"]), "{algorithm}");
    }
}

#[privileged::test]
fn no_spiffe_bundle_is_made_of_keys_that_spiffe_forbids() {
    let scene = Scene::new();
    make_key(&scene.keys().join(OLD), "EdDSA");
    let agent = scene.lasting_agent(&format!("algorithm: EdDSA, trust_domain: {DOMAIN}"));
    let error = bundle(&scene, &agent).expect_err("no EdDSA");
    assert!(error.contains("set `identity.algorithm` to ES256"), "{error}");
}
