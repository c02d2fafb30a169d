//! Afterburn writes the record's attributes, host name and keys, whichever cloud it takes the guest for.

use crate::node::{EC2_ID, LOCAL, NUMBER, Node, PRIVATE, PUBLIC, SUITE, V6};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use support::packages::{ESSENTIAL, Packages, With};
use support::root::Root;

/// For one run; a request that fails once makes it longer by a second, and fails the test.
const PATIENCE_SECONDS: u32 = 60;
/// The accounts: `core` gets the keys.
const ACCOUNTS: &str = "root:x:0:0::/root:/bin/sh\ncore:x:1000:1000::/home/core:/bin/sh\n";
const CORE: u32 = 1000;
const ATTRIBUTES: &str = "run/attributes";
const HOSTNAME: &str = "run/hostname";
const KEYS: &str = "home/core/.ssh/authorized_keys.d/afterburn";
/// Files of one run.
const WRITTEN: [&str; 3] = [ATTRIBUTES, HOSTNAME, KEYS];

const UUID: &str = "7c0f1a52-3b5e-4d1a-9d2c-000000000007";
const FQDN: &str = "guest-7.lab.internal";
const SHORT: &str = "guest-7";

/// One cloud that Afterburn and the agent share.
struct Cloud {
    /// Afterburn's name of it.
    provider: &'static str,
    /// What the names of its attributes begin with.
    prefix: &'static str,
    /// Attributes that a full record has, without the prefix. Any other is wrong.
    attributes: &'static [(&'static str, &'static str)],
    /// The name that it would give the guest.
    hostname: Option<&'static str>,
}

const CLOUDS: &[Cloud] = &[
    Cloud {
        provider: "akamai",
        prefix: "AKAMAI_",
        attributes: &[
            ("INSTANCE_ID", NUMBER),
            ("INSTANCE_HOST_UUID", UUID),
            ("INSTANCE_LABEL", SHORT),
            ("INSTANCE_REGION", "local"),
            ("INSTANCE_TYPE", "std.small"),
            ("INSTANCE_TAGS", "web"),
            ("PUBLIC_IPV4_0", "203.0.113.7/32"),
            ("PRIVATE_IPV4_0", "10.0.16.7/32"),
            ("PRIVATE_IPV4_1", "192.168.7.5/32"),
            ("IPV6_SLAAC", "2001:db8::7/128"),
            ("IPV6_LINK_LOCAL", ""),
        ],
        hostname: None,
    },
    Cloud {
        provider: "aliyun",
        prefix: "ALIYUN_",
        attributes: &[
            ("EIPV4", PUBLIC),
            ("HOSTNAME", SHORT),
            ("INSTANCE_ID", EC2_ID),
            ("INSTANCE_TYPE", "std.small"),
            ("IPV4_PRIVATE", LOCAL),
            ("IPV4_PUBLIC", PUBLIC),
            ("REGION_ID", "local"),
            ("VPC_ID", "vpc-292172a719c3f1f80"),
            ("ZONE_ID", "local-a"),
        ],
        hostname: Some(SHORT),
    },
    Cloud {
        provider: "aws",
        prefix: "AWS_",
        attributes: &[
            ("AVAILABILITY_ZONE", "local-a"),
            ("HOSTNAME", FQDN),
            ("INSTANCE_ID", EC2_ID),
            ("INSTANCE_TYPE", "std.small"),
            ("IPV4_LOCAL", LOCAL),
            ("IPV4_PUBLIC", PUBLIC),
            ("IPV6", V6),
            ("PUBLIC_HOSTNAME", FQDN),
            ("REGION", "local"),
        ],
        hostname: Some(FQDN),
    },
    Cloud {
        provider: "digitalocean",
        prefix: "DIGITALOCEAN_",
        attributes: &[
            ("HOSTNAME", FQDN),
            ("REGION", "local"),
            // What its NIC has: Afterburn configures it with that.
            ("IPV4_PUBLIC_0", LOCAL),
            ("IPV6_PUBLIC_0", V6),
            ("IPV4_PRIVATE_0", PRIVATE),
        ],
        hostname: Some(FQDN),
    },
    Cloud {
        provider: "gcp",
        prefix: "GCP_",
        attributes: &[
            ("HOSTNAME", FQDN),
            ("IP_EXTERNAL_0", PUBLIC),
            ("IP_LOCAL_0", LOCAL),
            ("MACHINE_TYPE", "projects/1/machineTypes/std.small"),
        ],
        hostname: Some(FQDN),
    },
    Cloud {
        provider: "hetzner",
        prefix: "HETZNER_",
        attributes: &[
            ("AVAILABILITY_ZONE", "local-a"),
            ("HOSTNAME", FQDN),
            ("INSTANCE_ID", NUMBER),
            ("PUBLIC_IPV4", PUBLIC),
            ("PUBLIC_IPV6", V6),
            ("REGION", "local"),
            ("PRIVATE_IPV4_0", PRIVATE),
        ],
        hostname: Some(FQDN),
    },
    Cloud {
        provider: "openstack-metadata",
        prefix: "OPENSTACK_",
        attributes: &[
            ("HOSTNAME", FQDN),
            ("INSTANCE_ID", EC2_ID),
            ("INSTANCE_TYPE", "std.small"),
            ("INSTANCE_UUID", UUID),
            ("IPV4_LOCAL", LOCAL),
            ("IPV4_PUBLIC", PUBLIC),
        ],
        hostname: Some(FQDN),
    },
    Cloud {
        provider: "oraclecloud",
        prefix: "ORACLECLOUD_",
        attributes: &[
            ("AVAILABILITY_DOMAIN", "local-a"),
            ("COMPARTMENT_ID", "lab"),
            ("FAULT_DOMAIN", "FAULT-DOMAIN-1"),
            ("HOSTNAME", SHORT),
            ("INSTANCE_ID", "ocid1.instance.oc1..7c0f1a52-3b5e-4d1a-9d2c-000000000007"),
            ("INSTANCE_SHAPE", "std.small"),
            ("REGION_ID", "local"),
        ],
        hostname: Some(SHORT),
    },
    Cloud {
        provider: "scaleway",
        prefix: "SCALEWAY_",
        attributes: &[
            ("HOSTNAME", SHORT),
            ("INSTANCE_ID", UUID),
            ("INSTANCE_TYPE", "std.small"),
            ("IPV4_PRIVATE", LOCAL),
            ("IPV4_PUBLIC", PUBLIC),
            ("IPV6_PUBLIC", V6),
            ("ZONE_ID", "local-a"),
        ],
        hostname: Some(SHORT),
    },
    Cloud {
        provider: "upcloud",
        prefix: "UPCLOUD_",
        attributes: &[("HOSTNAME", FQDN), ("INSTANCE_ID", UUID), ("REGION", "local")],
        hostname: Some(FQDN),
    },
    Cloud {
        provider: "vultr",
        prefix: "VULTR_",
        attributes: &[("HOSTNAME", SHORT), ("INSTANCE_ID", NUMBER), ("REGION_CODE", "LOC")],
        hostname: Some(SHORT),
    },
];

/// Those of them whose metadata is CloudStack's.
const FLAT: &[Cloud] = &[
    Cloud {
        provider: "cloudstack-metadata",
        prefix: "CLOUDSTACK_",
        attributes: &[
            ("AVAILABILITY_ZONE", "local-a"),
            ("CLOUD_IDENTIFIER", "CloudStack-local"),
            ("INSTANCE_ID", UUID),
            ("IPV4_LOCAL", LOCAL),
            ("IPV4_PUBLIC", PUBLIC),
            ("LOCAL_HOSTNAME", SHORT),
            ("PUBLIC_HOSTNAME", SHORT),
            ("SERVICE_OFFERING", "std.small"),
            ("VM_ID", UUID),
        ],
        hostname: None,
    },
    Cloud {
        provider: "exoscale",
        prefix: "EXOSCALE_",
        attributes: &[
            ("AVAILABILITY_ZONE", "local-a"),
            ("CLOUD_IDENTIFIER", "CloudStack-local"),
            ("INSTANCE_ID", UUID),
            ("LOCAL_HOSTNAME", SHORT),
            ("LOCAL_IPV4", LOCAL),
            ("PUBLIC_HOSTNAME", SHORT),
            ("PUBLIC_IPV4", PUBLIC),
            ("SERVICE_OFFERING", "std.small"),
            ("VM_ID", UUID),
        ],
        hostname: Some(SHORT),
    },
];

/// One that has no attributes without a goal state with SharedConfig.
const AZURE: &[Cloud] = &[Cloud {
    provider: "azure",
    prefix: "AZURE_",
    attributes: &[("IPV4_DYNAMIC", LOCAL), ("VMSIZE", "std.small")],
    hostname: Some(SHORT),
}];

/// Runs Afterburn for each of these clouds; a table that is empty when all is as it should be.
fn deviations(clouds: &[Cloud], bare: bool, change: impl FnOnce(&mut Value)) -> Option<String> {
    let program = support::afterburn::or_skip()?;
    let packages = Packages::or_skip(SUITE, &[ESSENTIAL, "libssl3"], With::Dependencies)?;
    let root = Root::copy_of(packages.root()).expect("a root");
    std::fs::copy(program, root.path("usr/bin/afterburn")).expect("a program");
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
    Some(deviations)
}

impl Cloud {
    /// Runs Afterburn; everything in which what it wrote differs from the record. Of a bare record only what is there
    /// is compared.
    fn run(&self, root: &Root, node: &Node, bare: bool) -> Result<(), String> {
        for file in WRITTEN {
            // Of the cloud before.
            std::fs::remove_file(root.path(file)).unwrap_or_default();
        }
        let mut words =
            vec!["afterburn", "multi", "--provider", self.provider, "--check-in", "--ssh-keys=core"];
        words.extend([
            "--attributes=/run/attributes",
            "--hostname=/run/hostname",
            "--network-units=/run/units",
        ]);
        let said =
            root.run(node.guest.ns(), &words, PATIENCE_SECONDS).map_err(|error| format!("{error:#}"))?;
        let mut wrong = String::new();
        if said.contains("Attempt #2") {
            wrong += &format!("  it had to ask again:\n{said}\n");
        }
        let read = |file| root.read(file).unwrap_or_default();
        let text = read(ATTRIBUTES);
        let own = |line: &'_ str| {
            let (name, value) =
                line.strip_prefix("AFTERBURN_")?.strip_prefix(self.prefix)?.split_once('=')?;
            Some((name.to_owned(), value.to_owned()))
        };
        let mut found: BTreeMap<String, String> = text.lines().filter_map(own).collect();
        for &(name, value) in self.attributes {
            let found = found.remove(name);
            if found.as_deref() != Some(value) && !(bare && found.is_none_or(|found| found.is_empty())) {
                wrong += &format!("  {name} is not {value}\n");
            }
        }
        if !found.is_empty() {
            wrong += &format!("  unexpected: {found:?}\n");
        }
        let keys = if bare { String::new() } else { node.guest.identity().ssh_key.clone() + "\n" };
        for (file, expected) in
            [(HOSTNAME, self.hostname.map(|name| name.to_owned() + "\n").unwrap_or_default()), (KEYS, keys)]
        {
            if read(file) != expected {
                wrong += &format!("  {file} is {:?}, expected {expected:?}\n", read(file));
            }
        }
        if wrong.is_empty() { Ok(()) } else { Err(format!("{wrong}{text}")) }
    }
}

/// A record without anything that a record need not have.
fn bare(record: &mut Value) {
    let fields = record.as_object_mut().expect("a mapping");
    fields.retain(|name, _| !["user_data", "ssh_keys", "labels"].contains(&name.as_str()));
    let nic = &mut record["network"]["nics"][0];
    nic["addresses"] = json!([{"method": "dhcp4"}]);
    record["network"]["nics"] = json!([nic]);
}

#[test]
fn afterburn_writes_what_the_record_says_for_every_cloud_it_shares() {
    let Some(deviations) = deviations(CLOUDS, false, |_| {}) else { return };
    assert!(deviations.is_empty(), "{deviations}");
}

#[test]
fn afterburn_writes_what_the_record_says_on_cloudstack_and_exoscale() {
    let flat = |record: &mut Value| record["serve"] = json!({"date_tree": "cloudstack"});
    let Some(deviations) = deviations(FLAT, false, flat) else { return };
    assert!(deviations.is_empty(), "{deviations}");
}

#[test]
fn afterburn_writes_what_the_record_says_on_azure() {
    let Some(deviations) = deviations(AZURE, false, |_| {}) else { return };
    assert!(deviations.is_empty(), "{deviations}");
}

#[test]
fn afterburn_asks_once_for_what_a_bare_record_does_not_have() {
    let Some(deviations) = deviations(CLOUDS, true, bare) else { return };
    assert!(deviations.is_empty(), "{deviations}");
}

#[test]
fn afterburn_asks_once_for_what_a_bare_record_does_not_have_on_exoscale() {
    let flat = |record: &mut Value| {
        bare(record);
        record["serve"] = json!({"date_tree": "cloudstack"});
    };
    let Some(deviations) = deviations(FLAT, true, flat) else { return };
    assert!(deviations.is_empty(), "{deviations}");
}
