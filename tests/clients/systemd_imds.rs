//! systemd's unmodified metadata client (`systemd-imds`) gets each key it knows from each cloud that the agent serves.

use anyhow::{Context as _, Result, bail, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use support::agent::{Agent, PortArgument};
use support::guest::{Guest, NIC, Spec};
use support::host::Host;
use support::packages::{Packages, With};
use support::record::{Identity, replace};
use support::{answers, inside};

const PUBLIC_V4: &str = "203.0.113.7";
const PUBLIC_V6: &str = "2001:db8::7";

/// Clouds in the client's table for which the agent has no dialect.
const OTHERS: [&str; 1] = ["tencent-cloud"];

fn record(identity: &Identity) -> Value {
    let mut record: Value = serde_json::from_str(&identity.record(1)).expect("a record");
    let addresses = &mut record["network"]["nics"][0]["addresses"];
    addresses[0]["public"] = PUBLIC_V4.into();
    addresses.as_array_mut().expect("a list").push(json!({
        "method": "static",
        "address": format!("{PUBLIC_V6}/64"),
        "gateway": "2001:db8::1",
    }));
    // The client requests a token for each cloud whose table entry names a token.
    record["serve"] = json!({ "imdsv2": "required" });
    record
}

/// The keys that are checked, by cloud. A key is as [`value`] says, or as its text says after `=`.
const EXPECTED: [(&str, &str); 8] = [
    ("amazon-ec2", "hostname=FQDN region zone ipv4-public ipv6-public ssh-key userdata"),
    ("microsoft-azure", "hostname region zone ipv4-public ipv6-public ssh-key userdata-base64"),
    (
        "google-gcp",
        "hostname=FQDN region=projects/1/regions/local zone=projects/1/zones/local-a ipv4-public \
         userdata-base userdata-base/user-data",
    ),
    ("hetzner-cloud", "hostname=FQDN region zone ipv4-public ssh-key userdata"),
    ("oracle-cloud-oci", "hostname region zone ssh-key userdata-base64"),
    ("scaleway", "userdata"),
    ("alibaba-ecs", "hostname region zone ssh-key userdata"),
    ("vultr", "hostname region=LOC ipv4-public ipv6-public ssh-key userdata"),
];

fn value(identity: &Identity, key: &str) -> String {
    match key {
        "hostname" => identity.hostname.clone(),
        "region" => "local".to_owned(),
        "zone" => "local-a".to_owned(),
        "ipv4-public" => PUBLIC_V4.to_owned(),
        "ipv6-public" => PUBLIC_V6.to_owned(),
        "ssh-key" => identity.ssh_key.clone(),
        "userdata" | "userdata-base/user-data" => identity.user_data.clone(),
        "userdata-base" => "ssh-keys\nuser-data\n".to_owned(),
        "userdata-base64" => STANDARD.encode(&identity.user_data),
        _ => panic!("{key} has no value"),
    }
}

fn expected(identity: &Identity) -> BTreeMap<&'static str, Vec<(&'static str, String)>> {
    let fqdn = format!("{}.{}", identity.hostname, answers::DOMAIN);
    let one = |key: &'static str| match key.split_once('=') {
        Some((key, "FQDN")) => (key, fqdn.clone()),
        Some((key, value)) => (key, value.to_owned()),
        None => (key, value(identity, key)),
    };
    EXPECTED.into_iter().map(|(cloud, keys)| (cloud, keys.split(' ').map(one).collect())).collect()
}

/// Boots a guest with `record` and an agent; calls `check` with the client's result for each key of each cloud.
fn each_key(record: &Value, mut check: impl FnMut(&str, &str, Result<Option<Vec<u8>>>)) {
    let Some(client) = SystemdImds::or_skip() else { return };
    let identity = Identity::of(0);
    let records = tempfile::tempdir().expect("a directory");
    replace(&identity.path(records.path()), &record.to_string()).expect("a record file");
    let host = Host::new().expect("a node");
    let guest = Guest::boot(&host, &Spec::of(&identity)).expect("a guest");
    let port = PortArgument::new(guest.host_tap().name(), identity.mac);
    let _agent = Agent::start(host.ns(), records.path(), &[port]).expect("an agent");
    for cloud in client.clouds().expect("a table") {
        if OTHERS.contains(&cloud.name()) {
            continue;
        }
        for key in cloud.keys() {
            check(cloud.name(), &key, client.ask(&guest, &cloud, &key, None));
            if key == "userdata-base" {
                let below = client.ask(&guest, &cloud, &key, Some("/user-data"));
                check(cloud.name(), "userdata-base/user-data", below);
            }
        }
    }
    eprintln!("systemd {}", client.version());
}

#[test]
fn systemds_client_gets_each_key_it_knows_from_each_cloud() {
    let identity = Identity::of(0);
    let expected = expected(&identity);
    let (mut asked, mut wrong) = (BTreeMap::<String, usize>::new(), Vec::new());
    each_key(&record(&identity), |cloud, key, found| {
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        let found = found.map(|found| found.map(text)).map_err(|error| format!("{error:#}"));
        let Some(keys) = expected.get(cloud) else {
            wrong.push(format!("{cloud} is new in the table; its {key} is {found:?}"));
            return;
        };
        *asked.entry(cloud.to_owned()).or_default() += 1;
        match keys.iter().find(|(name, _)| *name == key) {
            Some((_, value)) if found.as_ref().ok() == Some(&Some(value.clone())) => {}
            Some((_, value)) => wrong.push(format!("{cloud} {key}: {found:?}, expected {value:?}")),
            None => eprintln!("{cloud} {key}: {found:?}"),
        }
    });
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    if let Some(fewest) = asked.values().min() {
        assert!(*fewest > 0 && asked.len() >= 5, "{asked:?}");
    }
}

#[test]
fn systemd_imports_the_records_credentials_from_each_cloud() {
    let Some(client) = SystemdImds::or_skip() else { return };
    let identity = Identity::of(0);
    let records = tempfile::tempdir().expect("a directory");
    let mut record = record(&identity);
    record.as_object_mut().expect("a mapping").remove("user_data");
    record["systemd_credentials"] = json!([
        { "name": "a.text", "text": "first\nsecond \u{e9}\n" },
        { "name": "a.data", "data": "AP8=" },
        { "name": "a.encrypted", "encrypted": "AAEC" },
    ]);
    replace(&identity.path(records.path()), &record.to_string()).expect("a record file");
    let host = Host::new().expect("a node");
    let guest = Guest::boot(&host, &Spec::of(&identity)).expect("a guest");
    let port = PortArgument::new(guest.host_tap().name(), identity.mac);
    let _agent = Agent::start(host.ns(), records.path(), &[port]).expect("an agent");
    let expected: [(&str, &[u8]); 3] = [
        ("/run/credstore/a.text", "first\nsecond \u{e9}\n".as_bytes()),
        ("/run/credstore/a.data", &[0, 255]),
        ("/run/credstore.encrypted/a.encrypted", &[0, 1, 2]),
    ];
    let (mut wrong, mut clouds) = (Vec::new(), 0);
    for cloud in client.clouds().expect("a table").iter().filter(|cloud| !OTHERS.contains(&cloud.name())) {
        clouds += 1;
        let (found, said) =
            client.import(&guest, cloud).unwrap_or_else(|error| panic!("{}: {error:#}", cloud.name()));
        for (path, content) in expected {
            if found.get(path).map(Vec::as_slice) != Some(content) {
                wrong.push(format!("{} {path}: {:?}; {said}", cloud.name(), found.get(path)));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(clouds >= 5, "{clouds} clouds");
}

/// A missing key is a 404, after which the client ends. It would repeat the request after a 429 or 503.
#[test]
fn systemds_client_ends_without_a_key_that_the_record_lacks() {
    let identity = Identity::of(0);
    let mut bare = record(&identity);
    for member in ["ssh_keys", "user_data"] {
        bare.as_object_mut().expect("a mapping").remove(member);
    }
    // The address of a DHCP lease is unknown to the agent.
    bare["network"]["nics"][0]["addresses"] = json!([{ "method": "dhcp4" }]);
    let mut wrong = Vec::new();
    each_key(&bare, |cloud, key, found| match (key, found) {
        (_, Err(error)) => wrong.push(format!("{cloud} {key}: {error:#}")),
        ("hostname" | "region" | "zone", Ok(None)) => wrong.push(format!("{cloud} {key}: not found")),
        ("ssh-key" | "userdata" | "ipv4-public" | "ipv6-public", Ok(Some(text))) if !text.is_empty() => {
            wrong.push(format!("{cloud} {key}: {}", String::from_utf8_lossy(&text)));
        }
        _ => {}
    });
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

// The unmodified metadata client of systemd (`systemd-imdsd`, since version 261), and its table of the addresses,
// headers and keys of each cloud (`hwdb.d/40-imds.hwdb`).
//
// On a real machine, udev selects one cloud's part of the table by firmware values. Here the test passes that part in
// the environment variables of `systemd-imdsd(8)`.

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
pub(crate) struct SystemdImds {
    packages: Packages,
    /// The directory of its shared library.
    libraries: PathBuf,
}

/// One cloud's part of the table.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cloud {
    properties: BTreeMap<String, String>,
}

impl Cloud {
    #[must_use]
    pub(crate) fn name(&self) -> &str {
        self.properties.get("IMDS_VENDOR").map_or("", String::as_str)
    }

    /// The names of its keys, as for the client's option `--well-known`, such as `ipv4-public`.
    pub(crate) fn keys(&self) -> impl Iterator<Item = String> {
        let names = self.properties.keys().filter_map(|name| name.strip_prefix(KEY));
        names.map(|name| name.to_lowercase().replace('_', "-"))
    }
}

impl SystemdImds {
    /// Returns the client. Skips the test like [`privileged::or_skip`](support::privileged::or_skip) if privileges or the
    /// packages are missing.
    ///
    /// # Panics
    /// When something is missing and `XDP_IMDS_REQUIRE_PRIVILEGED` is 1.
    #[must_use]
    #[track_caller]
    pub(crate) fn or_skip() -> Option<Self> {
        let packages = Packages::or_skip(SUITE, PACKAGES, With::Nothing)?;
        let library = |path: PathBuf| path.join("systemd").is_dir().then(|| path.join("systemd"));
        let below = fs::read_dir(packages.root().join("usr/lib")).expect("an unpacked root");
        let libraries = below.flatten().find_map(|entry| library(entry.path())).expect("a shared library");
        Some(Self { packages, libraries })
    }

    #[must_use]
    pub(crate) fn version(&self) -> &str {
        self.packages.version("systemd-imds").unwrap_or("unknown")
    }

    /// The clouds of the table.
    ///
    /// # Errors
    /// When the table is missing or has another format.
    pub(crate) fn clouds(&self) -> Result<Vec<Cloud>> {
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
    pub(crate) fn import(&self, guest: &Guest, cloud: &Cloud) -> Result<(BTreeMap<String, Vec<u8>>, String)> {
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
    pub(crate) fn ask(
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
