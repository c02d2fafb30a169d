//! A node that issues identity tokens, with two guests.

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use serde_json::{Value, json};
use std::fs::{self, File, Permissions};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;
use support::agent::{self, Agent, PortArgument};
use support::bpffs::Bpffs;
use support::guest::{Guest, METADATA, Spec};
use support::host::Host;
use support::inside::Libraries;
use support::netns::Namespace;
use support::record::{Identity, replace};

pub(crate) const ISSUER: &str = "https://imds.lab.example";
pub(crate) const AUDIENCE: &str = "https://vault.lab.example/";
/// Lifetime of tokens, in seconds: the shortest that the agent accepts.
pub(crate) const LIFETIME: u64 = 10;
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// A private key.
pub(crate) struct Secret {
    /// A line of its PEM file.
    pub(crate) text: String,
    /// Its bytes that are not public: the last ones of an Ed25519 key in PKCS#8 version 1.
    pub(crate) bytes: Vec<u8>,
}

/// Makes a key with OpenSSL, as an operator would who looks after keys.
pub(crate) fn make_key(path: &Path, algorithm: &str) -> Secret {
    let words: &[&str] = match algorithm {
        "ES256" => &["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"],
        "EdDSA" => &["-algorithm", "ED25519"],
        _ => &["-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048"],
    };
    let output = Command::new("openssl").arg("genpkey").args(words).output().expect("openssl runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // The signer sees the file once it is complete.
    let aside = path.with_extension("tmp");
    fs::write(&aside, &output.stdout).expect("written");
    fs::set_permissions(&aside, Permissions::from_mode(0o600)).expect("private");
    fs::rename(&aside, path).expect("renamed");
    let pem = String::from_utf8(output.stdout).expect("text");
    let body: String = pem.lines().filter(|line| !line.starts_with('-')).collect();
    let bytes = STANDARD.decode(&body).expect("base64");
    let from = bytes.len().saturating_sub(32);
    Secret { text: body[..40].to_owned(), bytes: bytes[from..].to_vec() }
}

pub(crate) fn header(token: &str) -> Value {
    part(token, 0)
}

/// Returns the header of a token (0) or its claims (1), without verifying it.
pub(crate) fn part(token: &str, number: usize) -> Value {
    let part = token.split('.').nth(number).expect("a part");
    serde_json::from_slice(&URL_SAFE_NO_PAD.decode(part).expect("base64url")).expect("JSON")
}

pub(crate) fn with_input(input: &Value, script: &str) -> String {
    format!("import json\nINPUT = json.loads(r'''{input}''')\n{script}")
}

/// A node and its guests.
pub(crate) struct Scene {
    records: tempfile::TempDir,
    keys: tempfile::TempDir,
    bpffs: Bpffs,
    guests: Vec<Guest>,
    host: Host,
}

impl Scene {
    pub(crate) fn new() -> Self {
        let records = tempfile::tempdir().expect("a directory");
        let host = Host::new().expect("a node");
        let guests = (0..2).map(|number| {
            let identity = Identity::of(number);
            replace(&identity.path(records.path()), &identity.record(1)).expect("a record file");
            Guest::boot(&host, &Spec::of(&identity)).expect("a guest")
        });
        let guests = guests.collect();
        let keys = tempfile::tempdir().expect("a directory");
        Self { records, keys, bpffs: Bpffs::mount().expect("a bpffs"), guests, host }
    }

    pub(crate) fn keys(&self) -> &Path {
        self.keys.path()
    }

    pub(crate) fn node(&self) -> &Namespace {
        self.host.ns()
    }

    pub(crate) fn guests(&self) -> &[Guest] {
        &self.guests
    }

    pub(crate) fn audit(&self) -> String {
        self.keys().join("audit.log").display().to_string()
    }

    fn run(&self) -> PathBuf {
        self.records.path().join("run")
    }

    /// Starts an agent with further fields of `identity` and further arguments. Its tokens live for [`LIFETIME`].
    pub(crate) fn try_agent(&self, fields: &str, more: &[&str]) -> anyhow::Result<Agent<'_>> {
        self.start(&format!("lifetime_seconds: {LIFETIME}, {fields}"), more)
    }

    fn start(&self, fields: &str, more: &[&str]) -> anyhow::Result<Agent<'_>> {
        let config = self.keys().join("config.yaml");
        let keys = self.keys().display();
        let text = format!("identity: {{issuer: '{ISSUER}', keys: '{keys}', {fields}}}\n");
        fs::write(&config, text)?;
        let ports = self.guests.iter();
        let ports: Vec<_> =
            ports.map(|guest| PortArgument::new(guest.host_tap().name(), guest.identity().mac)).collect();
        let mut words = agent::arguments_with_pins(self.records.path(), &ports, &self.bpffs.pins());
        words.extend(["--config".into(), config.into()]);
        words.extend(more.iter().map(Into::into));
        Agent::start_binary(&agent::binary()?, self.host.ns(), words)
    }

    pub(crate) fn agent(&self, fields: &str, more: &[&str]) -> Agent<'_> {
        self.try_agent(fields, more).expect("an agent")
    }

    /// Starts an agent whose tokens outlive a test, however loaded the machine is.
    pub(crate) fn lasting_agent(&self, fields: &str) -> Agent<'_> {
        self.start(fields, &[]).expect("an agent")
    }

    pub(crate) fn change_record(&self, guest: usize, change: impl FnOnce(&mut Value)) {
        let identity = self.guests[guest].identity();
        let mut record: Value = serde_json::from_str(&identity.record(2)).expect("a record");
        change(&mut record);
        replace(&identity.path(self.records.path()), &record.to_string()).expect("a record file");
    }

    /// Asks for a token from a guest; returns status and body.
    pub(crate) fn ask(&self, guest: usize, words: &[&str], query: &str) -> (u16, String) {
        let url = format!("http://{METADATA}/v1/identity/jwt{query}");
        let fetched =
            self.guests[guest].curl(&[words, &[url.as_str()]].concat(), PATIENCE).expect("an answer");
        (fetched.status, fetched.text())
    }

    pub(crate) fn token(&self, guest: usize, audience: &str) -> String {
        let (status, token) = self.ask(guest, &["-H", "Metadata: true"], &format!("?audience={audience}"));
        assert_eq!(status, 200, "{token}");
        token
    }

    /// Returns the keys that the node publishes.
    pub(crate) fn published(&self, agent: &Agent<'_>) -> Value {
        let (status, text) = agent.ask("/.well-known/jwks.json").expect("keys");
        assert_eq!(status, 200, "{text}");
        serde_json::from_str(&text).expect("JSON")
    }

    /// Returns what a verifier finds for pairs of token and audience: the claims, or the name of its error.
    pub(crate) fn verify(
        &self,
        libraries: &Libraries,
        agent: &Agent<'_>,
        tokens: &[(&String, &str)],
    ) -> Vec<Value> {
        let input = json!({ "jwks": self.published(agent), "issuer": ISSUER, "tokens": tokens });
        let script = with_input(&input, include_str!("../jwt_verifier.py"));
        let found = libraries.run(self.guests[0].ns(), &script).expect("the verifier answers");
        found.as_array().expect("a list").clone()
    }

    /// Returns the process id of the agent's only child.
    pub(crate) fn signer(&self, agent: &Agent<'_>) -> u32 {
        let parent = format!("PPid:\t{}", agent.pid());
        let processes = fs::read_dir("/proc").expect("processes").flatten();
        let ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let is_child = |id: &u32| {
            fs::read_to_string(format!("/proc/{id}/status"))
                .is_ok_and(|status| status.lines().any(|line| line == parent))
        };
        let children: Vec<_> = ids.filter(is_child).collect();
        assert_eq!(children.len(), 1, "{children:?}");
        children[0]
    }

    pub(crate) fn status(&self) -> String {
        let mut command = Command::new(agent::binary().expect("the agent is built"));
        let output = command.args(["status", "--run"]).arg(self.run()).output().expect("the verb runs");
        String::from_utf8(output.stdout).expect("text")
    }
}

/// Returns whether the private writable memory of a process has each of the texts.
pub(crate) fn in_memory(pid: u32, wanted: &[&[u8]]) -> Vec<bool> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("readable by root");
    let mut memory = File::open(format!("/proc/{pid}/mem")).expect("readable by root");
    let mut found = vec![false; wanted.len()];
    for line in maps.lines().filter(|line| line.split(' ').nth(1).is_some_and(|mode| mode == "rw-p")) {
        let (from, to) = line.split(' ').next().and_then(|range| range.split_once('-')).expect("a range");
        let number = |text| u64::from_str_radix(text, 16).expect("an address");
        let mut bytes = Vec::new();
        memory.seek(SeekFrom::Start(number(from))).expect("an address");
        // Parts of a range that cannot be read hold nothing.
        if (&mut memory).take(number(to) - number(from)).read_to_end(&mut bytes).is_err() && bytes.is_empty()
        {
            continue;
        }
        for (found, wanted) in found.iter_mut().zip(wanted) {
            *found |= bytes.windows(wanted.len()).any(|window| window == *wanted);
        }
    }
    found
}

// An operator's certificate authority, by OpenSSL.

/// Runs OpenSSL in a directory; returns what it prints.
pub(crate) fn openssl(directory: &Path, words: &[&str]) -> Output {
    Command::new("openssl").current_dir(directory).args(words).output().expect("openssl runs")
}

/// An authority, and the certificate that it issued to a node.
pub(crate) struct Authority(tempfile::TempDir);

impl Authority {
    /// Creates an authority and a certificate that is valid for some days.
    pub(crate) fn new(days: u32) -> Self {
        let authority = Self(tempfile::tempdir().expect("a directory"));
        authority
            .run("req -x509 -newkey rsa:2048 -nodes -keyout root.key -out root.pem -subj /CN=root -days 99");
        authority.issue(days);
        authority
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    fn run(&self, words: &str) {
        let output = openssl(self.path(), &words.split(' ').collect::<Vec<_>>());
        assert!(output.status.success(), "{words}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// Issues a certificate with a new key, in the place of the last one.
    pub(crate) fn issue(&self, days: u32) {
        self.run("req -new -newkey rsa:2048 -nodes -keyout next.key -out node.csr -subj /CN=metadata");
        self.run(&format!("x509 -req -in node.csr -CA root.pem -CAkey root.key -days {days} -out node.pem"));
        let read = |name: &str| fs::read_to_string(self.path().join(name)).expect("a file");
        fs::write(self.path().join("next.pem"), read("node.pem") + &read("root.pem")).expect("written");
        fs::set_permissions(self.path().join("next.key"), Permissions::from_mode(0o600)).expect("private");
        for (from, to) in [("next.pem", "chain.pem"), ("next.key", "chain.key")] {
            fs::rename(self.path().join(from), self.path().join(to)).expect("renamed");
        }
    }

    /// Returns the chain's file and the key's file.
    pub(crate) fn files(&self) -> [PathBuf; 2] {
        ["chain.pem", "chain.key"].map(|name| self.path().join(name))
    }

    /// Returns `certificate` of the agent's configuration.
    pub(crate) fn field(&self) -> String {
        let [chain, key] = self.files();
        format!("certificate: {{chain: '{}', key: '{}'}}", chain.display(), key.display())
    }
}
