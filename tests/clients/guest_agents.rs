//! Unmodified guest agents other than cloud-init apply the record. Each runs in its own root file system.

use anyhow::ensure;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::{Command, Stdio};
use std::time::Duration;
use support::agent::{Agent, PortArgument};
use support::eventually;
use support::guest::{Guest, NIC, Spec};
use support::host::Host;
use support::inside::Root;
use support::packages::{ESSENTIAL, Packages, With};
use support::record::{Identity, replace};

// A guest with a modified record, the agent that serves it, and the environment of guest agents.

/// The Debian suite of the guest agents.
const SUITE: &str = "bookworm";
/// Address of the guest's NIC.
const LOCAL: &str = "10.0.16.7";
/// Public address, translated to [`LOCAL`].
const PUBLIC: &str = "203.0.113.7";
/// IPv6 address of the guest.
const V6: &str = "2001:db8::7";
/// Address of the second NIC.
const PRIVATE: &str = "192.168.7.5";
/// Numeric instance id.
const NUMBER: &str = "12345";
/// EC2 instance id.
const EC2_ID: &str = "i-0f5e8a1b2c3d4e5f6";
/// MAC of the second NIC.
const SECOND_MAC: &str = "52:54:00:6a:00:07";

/// A guest, its node and its record.
struct Node {
    records: tempfile::TempDir,
    guest: Guest,
    host: Host,
    record: Value,
}

impl Node {
    /// Boots a guest whose record has every field that guest agents read, modified by the test.
    fn new(change: impl FnOnce(&mut Value)) -> Self {
        let identity = Identity::of(7);
        let mut record: Value = serde_json::from_str(&identity.record(1)).expect("a record");
        record["vm"]["ec2_id"] = EC2_ID.into();
        record["vm"]["numeric_id"] = NUMBER.parse::<u64>().expect("a number").into();
        record["instance_type"] = "std.small".into();
        record["labels"] = json!(["web"]);
        record["network"]["dns"] = json!(["10.0.2.3"]);
        let nics = record["network"]["nics"].as_array_mut().expect("a list");
        nics[0]["addresses"][0]["public"] = PUBLIC.into();
        let v6 = json!({"method": "static", "address": format!("{V6}/64"), "gateway": "fe80::1"});
        nics[0]["addresses"].as_array_mut().expect("a list").push(v6);
        nics.push(json!({
            "id": "n1",
            "name": "eth1",
            "mac": SECOND_MAC,
            "role": "private",
            "network_id": "inner",
            "addresses": [{"method": "static", "address": format!("{PRIVATE}/24")}],
        }));
        change(&mut record);
        let records = tempfile::tempdir().expect("a directory");
        let host = Host::new().expect("a node");
        let guest = Guest::boot(&host, &Spec::of(&identity)).expect("a guest");
        let node = Self { records, guest, host, record };
        node.publish();
        node
    }

    /// Starts xdp-imds.
    fn agent(&self) -> Agent<'_> {
        let port = PortArgument::new(self.guest.host_tap().name(), self.guest.identity().mac);
        Agent::start(self.host.ns(), self.records.path(), &[port]).expect("an agent")
    }

    /// Publishes a changed record with the next generation.
    fn change(&self, change: impl FnOnce(&mut Value)) {
        let mut record = self.record.clone();
        let generation = record["generation"].as_u64().expect("a number");
        record["generation"] = (generation + 1).into();
        change(&mut record);
        self.write(&record);
    }

    fn publish(&self) {
        self.write(&self.record);
    }

    fn write(&self, record: &Value) {
        let path = self.guest.identity().path(self.records.path());
        replace(&path, &record.to_string()).expect("a record file");
    }

    /// Path (without the leading `/`) and content of the NIC's lease as systemd-networkd stores it. Guest agents
    /// find the servers of CloudStack and Azure in it.
    fn lease(&self) -> (String, &'static str) {
        let links = self.guest.ns().links().expect("links");
        let nic = links.iter().find(|link| link["ifname"] == NIC).expect("a NIC");
        let path = format!("run/systemd/netif/leases/{}", nic["ifindex"]);
        (path, "SERVER_ADDRESS=169.254.169.254\nOPTION_245=a83f8110\n")
    }
}

// The attributes Afterburn reads from a full record, for each cloud whose dialect we serve.

const FQDN: &str = "guest-7.lab.internal";
const SHORT: &str = "guest-7";

/// One cloud that both Afterburn and xdp-imds support.
struct Cloud {
    /// Afterburn's name for the cloud. Names of attributes begin with its first word.
    provider: &'static str,
    /// The host name Afterburn would set.
    hostname: Option<&'static str>,
    /// Every expected attribute as in its file, without the prefix.
    attributes: &'static str,
}

/// Clouds served by a record with `date_tree: ec2`.
const CLOUDS: &[Cloud] = &[
    Cloud {
        provider: "akamai",
        hostname: None,
        attributes: "INSTANCE_ID=12345 INSTANCE_HOST_UUID=7c0f1a52-3b5e-4d1a-9d2c-000000000007 \
                     INSTANCE_LABEL=guest-7 INSTANCE_REGION=local INSTANCE_TYPE=std.small INSTANCE_TAGS=web \
                     PUBLIC_IPV4_0=203.0.113.7/32 PRIVATE_IPV4_0=10.0.16.7/32 PRIVATE_IPV4_1=192.168.7.5/32 \
                     IPV6_SLAAC=2001:db8::7/128 IPV6_LINK_LOCAL=fe80::5054:ff:fe69:7/128",
    },
    Cloud {
        provider: "aliyun",
        hostname: Some(SHORT),
        attributes: "EIPV4=203.0.113.7 HOSTNAME=guest-7 INSTANCE_ID=i-0f5e8a1b2c3d4e5f6 \
                     INSTANCE_TYPE=std.small IPV4_PRIVATE=10.0.16.7 IPV4_PUBLIC=203.0.113.7 REGION_ID=local \
                     VPC_ID=vpc-292172a719c3f1f80 ZONE_ID=local-a",
    },
    Cloud {
        provider: "aws",
        hostname: Some(FQDN),
        attributes: "AVAILABILITY_ZONE=local-a HOSTNAME=guest-7.lab.internal INSTANCE_ID=i-0f5e8a1b2c3d4e5f6 \
                     INSTANCE_TYPE=std.small IPV4_LOCAL=10.0.16.7 IPV4_PUBLIC=203.0.113.7 IPV6=2001:db8::7 \
                     PUBLIC_HOSTNAME=guest-7.lab.internal REGION=local",
    },
    Cloud {
        provider: "digitalocean",
        hostname: Some(FQDN),
        // The NIC's own address: Afterburn configures the NIC with it.
        attributes: "HOSTNAME=guest-7.lab.internal REGION=local IPV4_PUBLIC_0=10.0.16.7 \
                     IPV6_PUBLIC_0=2001:db8::7 IPV4_PRIVATE_0=192.168.7.5",
    },
    Cloud {
        provider: "gcp",
        hostname: Some(FQDN),
        attributes: "HOSTNAME=guest-7.lab.internal IP_EXTERNAL_0=203.0.113.7 IP_LOCAL_0=10.0.16.7 \
                     MACHINE_TYPE=projects/1/machineTypes/std.small",
    },
    Cloud {
        provider: "hetzner",
        hostname: Some(FQDN),
        attributes: "AVAILABILITY_ZONE=local-a HOSTNAME=guest-7.lab.internal INSTANCE_ID=12345 \
                     PUBLIC_IPV4=203.0.113.7 PUBLIC_IPV6=2001:db8::7 REGION=local PRIVATE_IPV4_0=192.168.7.5",
    },
    Cloud {
        provider: "openstack-metadata",
        hostname: Some(FQDN),
        attributes: "HOSTNAME=guest-7.lab.internal INSTANCE_ID=i-0f5e8a1b2c3d4e5f6 INSTANCE_TYPE=std.small \
                     INSTANCE_UUID=7c0f1a52-3b5e-4d1a-9d2c-000000000007 IPV4_LOCAL=10.0.16.7 \
                     IPV4_PUBLIC=203.0.113.7",
    },
    Cloud {
        provider: "oraclecloud",
        hostname: Some(SHORT),
        attributes: "AVAILABILITY_DOMAIN=local-a COMPARTMENT_ID=lab FAULT_DOMAIN=FAULT-DOMAIN-1 \
                     HOSTNAME=guest-7 INSTANCE_ID=ocid1.instance.oc1..7c0f1a52-3b5e-4d1a-9d2c-000000000007 \
                     INSTANCE_SHAPE=std.small REGION_ID=local",
    },
    Cloud {
        provider: "scaleway",
        hostname: Some(SHORT),
        attributes: "HOSTNAME=guest-7 INSTANCE_ID=7c0f1a52-3b5e-4d1a-9d2c-000000000007 \
                     INSTANCE_TYPE=std.small IPV4_PRIVATE=10.0.16.7 IPV4_PUBLIC=203.0.113.7 \
                     IPV6_PUBLIC=2001:db8::7 ZONE_ID=local-a",
    },
    Cloud {
        provider: "upcloud",
        hostname: Some(FQDN),
        attributes: "HOSTNAME=guest-7.lab.internal INSTANCE_ID=7c0f1a52-3b5e-4d1a-9d2c-000000000007 \
                     REGION=local",
    },
    Cloud {
        provider: "vultr",
        hostname: Some(SHORT),
        attributes: "HOSTNAME=guest-7 INSTANCE_ID=12345 REGION_CODE=LOC",
    },
];

/// Clouds served by a record with `date_tree: cloudstack`.
const FLAT: &[Cloud] = &[
    Cloud {
        provider: "cloudstack-metadata",
        hostname: None,
        attributes: "AVAILABILITY_ZONE=local-a CLOUD_IDENTIFIER=CloudStack-local \
                     INSTANCE_ID=7c0f1a52-3b5e-4d1a-9d2c-000000000007 IPV4_LOCAL=10.0.16.7 \
                     IPV4_PUBLIC=203.0.113.7 LOCAL_HOSTNAME=guest-7 PUBLIC_HOSTNAME=guest-7 \
                     SERVICE_OFFERING=std.small VM_ID=7c0f1a52-3b5e-4d1a-9d2c-000000000007",
    },
    Cloud {
        provider: "exoscale",
        hostname: Some(SHORT),
        attributes: "AVAILABILITY_ZONE=local-a CLOUD_IDENTIFIER=CloudStack-local \
                     INSTANCE_ID=7c0f1a52-3b5e-4d1a-9d2c-000000000007 LOCAL_HOSTNAME=guest-7 \
                     LOCAL_IPV4=10.0.16.7 PUBLIC_HOSTNAME=guest-7 PUBLIC_IPV4=203.0.113.7 \
                     SERVICE_OFFERING=std.small VM_ID=7c0f1a52-3b5e-4d1a-9d2c-000000000007",
    },
];

/// Azure: its goal state names a configuration that holds the attributes.
const AZURE: &[Cloud] = &[Cloud {
    provider: "azure",
    hostname: Some(SHORT),
    // No IPV4_VIRTUAL: this release expects `loadBalancedPublicAddress` as an element, but it is an attribute.
    attributes: "IPV4_DYNAMIC=10.0.16.7 VMSIZE=std.small",
}];

// Afterburn writes the record's attributes, host name and keys for every cloud whose dialect we serve.

/// Bound on one run of a program. Amazon's script waits 30 s for a silent server; Ignition stops fetching a config after
/// half of the bound.
const PATIENCE_SECONDS: u32 = 60;
/// Accounts in the guest's root; `core` gets the keys.
const ACCOUNTS: &str = "root:x:0:0::/root:/bin/sh\ncore:x:1000:1000::/home/core:/bin/sh\n";
const CORE: u32 = 1000;
const ATTRIBUTES: &str = "run/attributes";
const HOSTNAME: &str = "run/hostname";
const KEYS: &str = "home/core/.ssh/authorized_keys.d/afterburn";
/// Files that one run writes.
const WRITTEN: [&str; 3] = [ATTRIBUTES, HOSTNAME, KEYS];
/// An attribute with one of these substrings may be empty with a bare record.
const ONLY_FULL: [&str; 5] = [LOCAL, PUBLIC, V6, PRIVATE, "web"];

/// Runs Afterburn for each cloud, and lists what differs from the record.
fn check_afterburn(clouds: &[Cloud], bare: bool, change: impl FnOnce(&mut Value)) {
    let packages = || Packages::or_skip(SUITE, &[ESSENTIAL, "libssl3"], With::Dependencies);
    let found = support::inside::afterburn_or_skip().and_then(|program| Some((program, packages()?)));
    let Some((program, packages)) = found else { return };
    let root = Root::copy_of(packages.root()).expect("a root");
    // By a program of its own: a file that this one has open for writing cannot be run meanwhile (ETXTBSY).
    let afterburn = root.path("usr/bin/afterburn");
    let copied = Command::new("cp").arg(program).arg(afterburn).status().expect("cp runs");
    assert!(copied.success(), "{copied}");
    root.write("etc/passwd", ACCOUNTS).expect("accounts");
    let home = root.path("home/core");
    std::fs::create_dir_all(&home).expect("a home");
    std::os::unix::fs::chown(home, Some(CORE), Some(CORE)).expect("an owner");
    let node = Node::new(change);
    let _agent = node.agent();
    let (path, lease) = node.lease();
    root.write(&path, lease).expect("a lease");
    let mut deviations = String::new();
    for cloud in clouds {
        if let Err(wrong) = cloud.run(&root, &node, bare) {
            writeln!(deviations, "{}:\n{wrong}", cloud.provider).expect("text has room");
        }
    }
    assert!(deviations.is_empty(), "{deviations}");
}

impl Cloud {
    /// Runs Afterburn; the error lists every difference between its files and the record.
    fn run(&self, root: &Root, node: &Node, bare: bool) -> Result<(), String> {
        for file in WRITTEN {
            // The run for the previous cloud has written this file.
            std::fs::remove_file(root.path(file)).unwrap_or_default();
        }
        let words = ["afterburn", "multi", "--provider", self.provider, "--check-in", "--ssh-keys=core"];
        let files =
            ["--attributes=/run/attributes", "--hostname=/run/hostname", "--network-units=/run/units"];
        let output = root.run(node.guest.ns(), &[&words[..], &files].concat(), PATIENCE_SECONDS);
        let output = output.map_err(|error| format!("{error:#}"))?;
        let read = |file| root.read(file).unwrap_or_default();
        let text = read(ATTRIBUTES);
        let mut wrong = self.wrong_attributes(&text, bare);
        if output.contains("Attempt #2") {
            wrong += &format!("  it repeated a request:\n{output}\n");
        }
        let line = |text: &str| format!("{text}\n");
        let hostname = self.hostname.map(line).unwrap_or_default();
        let keys = if bare { String::new() } else { line(&node.guest.identity().ssh_key) };
        for (file, expected) in [(HOSTNAME, hostname), (KEYS, keys)] {
            if read(file) != expected {
                wrong += &format!("  {file} is {:?}, expected {expected:?}\n", read(file));
            }
        }
        if wrong.is_empty() { Ok(()) } else { Err(wrong + &text) }
    }

    /// Lists wrong attributes. With a bare record, those of a full record must be absent or empty.
    fn wrong_attributes(&self, text: &str, bare: bool) -> String {
        let cloud = self.provider.split('-').next().unwrap_or_default();
        let prefix = format!("AFTERBURN_{}_", cloud.to_uppercase());
        let own = |line: &str| {
            let (name, value) = line.strip_prefix(&prefix)?.split_once('=')?;
            Some((name.to_owned(), value.to_owned()))
        };
        let mut found: BTreeMap<String, String> = text.lines().filter_map(own).collect();
        let mut wrong = String::new();
        for (name, value) in self.attributes.split(' ').filter_map(|word| word.split_once('=')) {
            let found = found.remove(name).unwrap_or_default();
            let only_full = name == "PUBLIC_HOSTNAME" || ONLY_FULL.iter().any(|part| value.contains(part));
            if found != value && !(bare && only_full && found.is_empty()) {
                wrong += &format!("  {name} is {found:?}, expected {value:?}\n");
            }
        }
        if !found.is_empty() {
            wrong += &format!("  unexpected: {found:?}\n");
        }
        wrong
    }
}

/// Removes every optional field of a record.
fn bare(record: &mut Value) {
    let fields = record.as_object_mut().expect("a mapping");
    fields.retain(|name, _| !["user_data", "ssh_keys", "labels"].contains(&name.as_str()));
    let nic = &mut record["network"]["nics"][0];
    nic["addresses"] = json!([{"method": "dhcp4"}]);
    record["network"]["nics"] = json!([nic]);
}

#[test]
fn afterburn_writes_the_records_values_for_every_shared_cloud() {
    check_afterburn(CLOUDS, false, |_| {});
}

#[test]
fn afterburn_writes_the_records_values_on_cloudstack_and_exoscale() {
    let flat = |record: &mut Value| record["serve"] = json!({"date_tree": "cloudstack"});
    check_afterburn(FLAT, false, flat);
}

#[test]
fn afterburn_writes_the_records_values_on_azure() {
    check_afterburn(AZURE, false, |_| {});
}

#[test]
fn afterburn_repeats_no_request_with_a_bare_record_on_azure() {
    check_afterburn(AZURE, true, bare);
}

#[test]
fn afterburn_repeats_no_request_with_a_bare_record() {
    check_afterburn(CLOUDS, true, bare);
}

#[test]
fn afterburn_repeats_no_request_with_a_bare_record_on_exoscale() {
    let flat = |record: &mut Value| {
        bare(record);
        record["serve"] = json!({"date_tree": "cloudstack"});
    };
    check_afterburn(FLAT, true, flat);
}

// Google's guest agent creates accounts for the record's keys, runs the record's script and follows its changes.

/// Bound on the agent's first round: it creates three host keys, and an account by running five programs.
const FIRST_ROUND: Duration = Duration::from_secs(60);
/// Bound on noticing a change. It is shorter than the 60 s after which the agent's waiting request ends anyway, so a
/// change must wake the request.
const NOTICED: Duration = Duration::from_secs(30);
/// Bound on the agent's run time.
const LIFE_SECONDS: u32 = 180;

fn google_root() -> Option<Root> {
    let names = [ESSENTIAL, "google-guest-agent", "passwd", "openssh-client"];
    let packages = Packages::or_skip(SUITE, &names, With::Dependencies)?;
    let root = Root::copy_of(packages.root()).expect("a root");
    // Maintainer scripts of other packages would create these.
    root.write("etc/shadow", "").expect("a file");
    std::fs::create_dir_all(root.path("etc/sudoers.d")).expect("a directory");
    Some(root)
}

/// The keys the agent gave an account.
fn keys(root: &Root, account: &str) -> Vec<String> {
    let text = root.read(&format!("home/{account}/.ssh/authorized_keys")).unwrap_or_default();
    text.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect()
}

/// A key unique to `number`.
fn key(number: u16) -> String {
    Identity::of(number).ssh_key
}

fn key_of(account: &str, number: u16) -> Value {
    json!({"name": format!("{account}-{number}"), "user": account, "key": key(number)})
}

#[test]
fn googles_guest_agent_creates_accounts_and_follows_record_changes() {
    let Some(root) = google_root() else { return };
    let node = Node::new(|record| record["ssh_keys"] = json!([key_of("alice", 1)]));
    let _agent = node.agent();
    let mut daemon = root.start(node.guest.ns(), &["google_guest_agent"], LIFE_SECONDS).expect("an agent");
    let mut accounts = |patience, expected: [(&str, &[u16]); 2]| {
        let as_expected = || {
            for (account, numbers) in expected {
                let expected: Vec<_> = numbers.iter().copied().map(key).collect();
                let found = keys(&root, account);
                ensure!(found == expected, "{account} has {found:?}, expected {expected:?}");
            }
            Ok(())
        };
        let outcome = eventually(patience, as_expected);
        daemon.runs().and(outcome).expect("accounts as in the record");
    };
    accounts(FIRST_ROUND, [("alice", &[1]), ("bob", &[])]);
    let groups = root.read("etc/group").expect("groups");
    assert!(
        groups.lines().any(|line| line.starts_with("google-sudoers:") && line.ends_with(":alice")),
        "{groups}"
    );

    node.change(|record| {
        record["ssh_keys"] = json!([key_of("alice", 1), key_of("alice", 2), key_of("bob", 3)])
    });
    accounts(NOTICED, [("alice", &[1, 2]), ("bob", &[3])]);
    node.change(|record| record["ssh_keys"] = json!([key_of("bob", 3)]));
    accounts(NOTICED, [("alice", &[]), ("bob", &[3])]);

    let own = root.read("etc/ssh/ssh_host_ed25519_key.pub").expect("a host key");
    let path = "/computeMetadata/v1/instance/guest-attributes/hostkeys/ssh-ed25519";
    let url = format!("http://169.254.169.254{path}");
    let stored = node.guest.curl(&["--header", "Metadata-Flavor: Google", &url], NOTICED).expect("an answer");
    assert_eq!(own.split(' ').nth(1), Some(stored.text().as_str()), "the host key as a guest attribute");
}

#[test]
fn googles_script_runner_runs_the_startup_script() {
    let Some(root) = google_root() else { return };
    let script = "#!/bin/sh\necho ran > /run/started\n";
    let node = Node::new(|record| record["metadata"] = json!({"startup-script": script}));
    let _agent = node.agent();
    let words = ["google_metadata_script_runner", "startup"];
    let output = root.run(node.guest.ns(), &words, PATIENCE_SECONDS).expect("a run");
    assert_eq!(root.read("run/started").unwrap_or_default(), "ran\n", "{output}");
}

// Ignition fetches its config from the user-data of every cloud whose dialect we serve, and applies it.

/// Path of the program in Debian.
const PROGRAM: &str = "/usr/lib/dracut/modules.d/30ignition/ignition";
/// The program that writes SELinux labels, replaced by a stub.
const LABELS: &str = "usr/sbin/setfiles";
/// The file that the config writes.
const FILE: &str = "etc/from-user-data";

/// Every platform of Debian's Ignition that fetches from an HTTP server we implement. Nutanix, KubeVirt and the
/// others read a disk.
const PLATFORMS: [&str; 9] =
    ["aliyun", "aws", "azure", "cloudstack", "digitalocean", "exoscale", "gcp", "openstack", "vultr"];

/// A config that writes a file.
fn config() -> String {
    json!({
        "ignition": {"version": "3.3.0"},
        "storage": {"files": [{"path": format!("/{FILE}"), "contents": {"source": "data:,applied"}}]},
    })
    .to_string()
}

/// Runs Ignition for each platform, and lists those whose result differs from `expected`.
fn check_ignition(platforms: &[&str], expected: Option<&str>, change: impl FnOnce(&mut Value)) {
    let packages = Packages::or_skip(SUITE, &[ESSENTIAL, "ignition"], With::Dependencies);
    let Some(packages) = packages else { return };
    let root = Root::copy_of(packages.root()).expect("a root");
    std::os::unix::fs::symlink("/bin/true", root.path(LABELS)).expect("a link");
    let node = Node::new(change);
    let _agent = node.agent();
    let (path, lease) = node.lease();
    root.write(&path, lease).expect("a lease");
    let mut deviations = String::new();
    for platform in platforms {
        match provision(&root, &node, platform) {
            Ok(found) if found.as_deref() == expected => {}
            Ok(found) => writeln!(deviations, "{platform}: {found:?}").expect("text has room"),
            Err(error) => writeln!(deviations, "{platform}: {error:#}").expect("text has room"),
        }
    }
    assert!(deviations.is_empty(), "{deviations}");
}

/// Fetches a config and applies it to a tree of its own; returns the content of the config's file.
fn provision(root: &Root, node: &Node, platform: &str) -> anyhow::Result<Option<String>> {
    let tree = format!("sysroot-{platform}");
    // Debian's build expects a tree with SELinux labels.
    root.write(&format!("{tree}/etc/selinux/config"), "SELINUXTYPE=targeted\n")?;
    let mut output = String::new();
    for stage in ["fetch", "files"] {
        let words = [
            PROGRAM,
            &format!("-platform={platform}"),
            &format!("-stage={stage}"),
            &format!("-root=/{tree}"),
            &format!("-config-cache=/run/{platform}.json"),
            &format!("-state-file=/run/{platform}.state"),
            &format!("-fetch-timeout={}s", PATIENCE_SECONDS / 2),
            "-log-to-stdout",
        ];
        output += &root.run(node.guest.ns(), &words, PATIENCE_SECONDS)?;
    }
    anyhow::ensure!(!output.contains("attempt #2"), "Ignition repeated a request:\n{output}");
    Ok(root.read(&format!("{tree}/{FILE}")).ok())
}

#[test]
fn ignition_applies_the_user_data_of_every_shared_cloud() {
    let change = |record: &mut Value| record["user_data"] = json!({"text": config()});
    check_ignition(&PLATFORMS, Some("applied"), change);
}

#[test]
fn ignition_gets_its_config_where_tokens_are_required() {
    let change = |record: &mut Value| {
        record["user_data"] = json!({"text": config()});
        record["serve"] = json!({"imdsv2": "required"});
    };
    check_ignition(&["aws"], Some("applied"), change);
}

#[test]
fn ignition_continues_at_once_without_user_data() {
    // Azure's provider waits for a disk without limit if there is no user-data.
    let platforms: Vec<_> = PLATFORMS.into_iter().filter(|platform| *platform != "azure").collect();
    let change = |record: &mut Value| drop(record.as_object_mut().expect("a mapping").remove("user_data"));
    check_ignition(&platforms, None, change);
}

// amazon-ec2-net-utils sets up policy routes from the record: traffic from each NIC leaves through that NIC.

/// Programs that need a running systemd, replaced by stubs.
const OF_SYSTEMD: [&str; 3] =
    ["usr/bin/networkctl", "usr/bin/logger", "usr/lib/systemd/systemd-networkd-wait-online"];
const NETWORKS: &str = "run/systemd/network";

fn net_utils_root(suite: &str) -> Option<Root> {
    let names = [ESSENTIAL, "amazon-ec2-net-utils"];
    let packages = Packages::or_skip(suite, &names, With::Dependencies)?;
    let root = Root::copy_of(packages.root()).expect("a root");
    for program in OF_SYSTEMD {
        std::fs::remove_file(root.path(program)).unwrap_or_default();
        std::os::unix::fs::symlink("/bin/true", root.path(program)).expect("a link");
    }
    Some(root)
}

/// The values of a key in systemd's files, in order.
fn values<'a>(text: &'a str, key: &str) -> Vec<&'a str> {
    text.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('=')).collect()
}

fn assert_traffic_leaves_through_its_own_nic(suite: &str) {
    let Some(root) = net_utils_root(suite) else { return };
    let node = Node::new(|record| {
        record["serve"] = json!({"imdsv2": "required"});
        record["network"]["nics"][1]["addresses"] = json!([
            {"method": "static", "address": "192.168.7.5/24"},
            {"method": "static", "address": "192.168.7.6/24"},
            {"method": "static", "address": "2001:db8:1::5/64"},
        ]);
    });
    let ns = node.guest.ns();
    ns.ip(&format!("link add eth1 address {SECOND_MAC} type veth peer name wire")).expect("a second NIC");
    ns.sysctl("ipv6/conf/eth1/disable_ipv6", "0").expect("IPv6");
    ns.ip_batch(
        "link set eth1 up\naddr add 192.168.7.5/24 dev eth1\naddr add 2001:db8:1::5/64 dev eth1 nodad\n",
    )
    .expect("addresses");
    let _agent = node.agent();
    let mut output = String::new();
    for nic in [NIC, "eth1"] {
        output += &root.run(ns, &["setup-policy-routes", nic, "start"], PATIENCE_SECONDS).expect("a run");
    }
    let read = |name: &str| root.read(&format!("{NETWORKS}/70-{name}")).unwrap_or_default();
    let (first, second) = (read("eth0.network.d/eni.conf"), read("eth1.network.d/eni.conf"));
    let [v4, v6, alias] =
        ["policy_4", "policy_6", "alias"].map(|name| read(&format!("eth1.network.d/ec2net_{name}.conf")));
    let mac = node.guest.identity().mac.to_string();
    assert_eq!(values(&first, "MACAddress"), [mac.as_str()], "{output}");
    assert_eq!(values(&second, "MACAddress"), [SECOND_MAC], "{output}");
    assert_eq!(values(&v4, "From"), ["192.168.7.5", "192.168.7.6"], "{output}");
    assert_eq!(values(&v6, "From"), ["2001:db8:1::5"], "{output}");
    assert_eq!(values(&alias, "Address"), ["192.168.7.6/32"], "{output}");
    for text in [&v4, &v6] {
        assert!(
            values(text, "Table").iter().all(|table| *table == "10001"),
            "tables of the second NIC: {text}"
        );
    }
    assert!(values(&second, "Table").contains(&"10001"), "{second}");
    let link = ns.ip("link show dev eth1").expect("a NIC");
    assert!(link.contains("altname eni-") && link.contains("altname device-number-1"), "{link}");
}

#[test]
fn net_utils_2_3_routes_each_nics_traffic_out_of_that_nic() {
    assert_traffic_leaves_through_its_own_nic("bookworm");
}

#[test]
fn net_utils_2_4_routes_each_nics_traffic_out_of_that_nic() {
    assert_traffic_leaves_through_its_own_nic("trixie");
}

// Programs that print a guest's metadata: EC2's two scripts (cloud-utils, amazon-ec2-utils), and Chef's ohai on each
// cloud whose metadata it reads.

/// Bound on one program. ohai starts Ruby and asks for each name of a tree by itself.
const TOOL_SECONDS: u32 = 120;
/// Directory of the files that tell ohai on which cloud it runs.
const HINTS: &str = "etc/chef/ohai/hints";

fn tool_root(package: &str) -> Option<Root> {
    let packages = Packages::or_skip(SUITE, &[ESSENTIAL, package], With::Dependencies)?;
    Some(Root::copy_of(packages.root()).expect("a root"))
}

fn node() -> Node {
    Node::new(|record| {
        record["serve"] = json!({"imdsv2": "required"});
        record["image"] = json!({"id": "ami-00000001"});
        record["metadata"] = json!({"role": "web", "tier": "front"});
    })
}

/// What a program prints on its standard output.
fn printed(root: &Root, node: &Node, words: &[&str]) -> String {
    let mut command = root.command(words, TOOL_SECONDS);
    let output = node.guest.ns().output(command.stderr(Stdio::piped())).expect("it starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words:?} ended with {}: {said}", output.status);
    String::from_utf8(output.stdout).expect("text")
}

/// Checks lines in the form `name: value`.
fn assert_lines(text: &str, expected: &[(&str, &str)]) {
    for (name, value) in expected {
        let line = format!("{name}: {value}");
        assert!(text.lines().any(|found| found == line), "no line {line:?} in:\n{text}");
    }
}

#[test]
fn ec2metadata_prints_the_record() {
    let Some(root) = tool_root("cloud-guest-utils") else { return };
    let node = node();
    let _agent = node.agent();
    let identity = node.guest.identity();
    // Binary user-data is the program's only value that it prints as Python's bytes.
    let text = printed(&root, &node, &["ec2metadata"]);
    assert_lines(
        &text,
        &[
            ("ami-id", "ami-00000001"),
            ("ami-launch-index", "0"),
            ("availability-zone", "local-a"),
            ("instance-id", EC2_ID),
            ("instance-type", "std.small"),
            ("local-hostname", FQDN),
            ("local-ipv4", LOCAL),
            ("mac", &identity.mac.to_string()),
            ("public-hostname", FQDN),
            ("public-ipv4", PUBLIC),
            ("public-keys", &format!("['{}']", identity.ssh_key)),
            ("region", "local"),
        ],
    );
    assert_eq!(printed(&root, &node, &["ec2metadata", "--user-data"]), identity.user_data);
}

#[test]
fn amazons_ec2_metadata_prints_the_record() {
    let Some(root) = tool_root("amazon-ec2-utils") else { return };
    let node = node();
    let _agent = node.agent();
    let identity = node.guest.identity();
    let text = printed(&root, &node, &["ec2-metadata", "--all"]);
    assert_lines(
        &text,
        &[
            ("ami-id", "ami-00000001"),
            ("instance-id", EC2_ID),
            ("instance-type", "std.small"),
            ("local-hostname", FQDN),
            ("local-ipv4", LOCAL),
            ("placement", "local-a"),
            ("public-ipv4", PUBLIC),
        ],
    );
    for piece in [&identity.ssh_key, &identity.user_data, "role: web", "tier: front"] {
        assert!(text.contains(piece.trim_end()), "no {piece:?} in:\n{text}");
    }
}

/// What ohai finds on a cloud of which a hint tells it.
fn found(root: &Root, node: &Node, cloud: &str) -> Value {
    root.write(&format!("{HINTS}/{cloud}.json"), "{}").expect("a hint");
    let text = printed(root, node, &["ohai", "--log_level", "fatal", cloud]);
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{cloud}: {error}: {text}"))
}

/// Checks values by their JSON pointers.
fn assert_values(found: &Value, expected: &[(&str, Value)]) {
    for (pointer, value) in expected {
        assert_eq!(found.pointer(pointer), Some(value), "{pointer} of {found:#}");
    }
}

#[test]
fn ohai_reads_the_record_on_each_of_its_clouds() {
    let Some(root) = tool_root("ohai") else { return };
    root.write("etc/hosts", "127.0.0.1 localhost\n169.254.169.254 metadata.google.internal.\n")
        .expect("a file");
    let node = node();
    let _agent = node.agent();
    let identity = node.guest.identity();
    let (mac, key) = (identity.mac.to_string(), identity.ssh_key.as_str());
    let nic = |member: &str| format!("/network_interfaces_macs/{mac}/{member}");
    assert_values(
        &found(&root, &node, "ec2"),
        &[
            ("/account_id", json!("000000000000")),
            ("/availability_zone", json!("local-a")),
            ("/hostname", json!(FQDN)),
            ("/instance_id", json!(EC2_ID)),
            ("/local_ipv4", json!(LOCAL)),
            ("/public_ipv4", json!(PUBLIC)),
            ("/public_keys_0_openssh_key", json!(key)),
            ("/region", json!("local")),
            ("/tags_instance_role", json!("web")),
            ("/userdata", json!(identity.user_data)),
            (&nic("ipv6s"), json!(V6)),
            (&nic("local_ipv4s"), json!(LOCAL)),
            (&format!("/network_interfaces_macs/{SECOND_MAC}/local_ipv4s"), json!(PRIVATE)),
        ],
    );
    let openstack = found(&root, &node, "openstack");
    assert_values(&openstack, &[("/instance_id", json!(EC2_ID)), ("/provider", json!("openstack"))]);
    assert_values(
        &found(&root, &node, "gce"),
        &[
            ("/instance/hostname", json!(FQDN)),
            ("/instance/networkInterfaces/0/ip", json!(LOCAL)),
            ("/instance/tags", json!(["web"])),
            ("/instance/attributes/role", json!("web")),
            ("/project/projectId", json!("lab")),
        ],
    );
    let upper = mac.replace(':', "").to_uppercase();
    assert_values(
        &found(&root, &node, "azure"),
        &[
            ("/metadata/compute/name", json!(identity.hostname)),
            ("/metadata/compute/vmSize", json!("std.small")),
            ("/metadata/network/public_ipv4", json!([PUBLIC])),
            (&format!("/metadata/network/interfaces/{upper}/local_ipv4"), json!([LOCAL])),
            (&format!("/metadata/network/interfaces/{upper}/local_ipv6"), json!([V6])),
        ],
    );
    assert_values(
        &found(&root, &node, "digital_ocean"),
        &[
            ("/hostname", json!(FQDN)),
            ("/interfaces/public/0/ipv4/ip_address", json!(LOCAL)),
            ("/public_keys", json!([key])),
            ("/tags", json!(["web"])),
        ],
    );
    assert_values(
        &found(&root, &node, "scaleway"),
        &[
            ("/commercial_type", json!("std.small")),
            ("/hostname", json!(identity.hostname)),
            ("/public_ip/address", json!(PUBLIC)),
            ("/ssh_public_keys/0/key", json!(key)),
        ],
    );
}
