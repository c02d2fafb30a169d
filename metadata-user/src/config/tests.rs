use metadata_common::addresses;
use metadata_steer::PortLimits;
#[cfg(feature = "kubevirt")]
use serde_json::Value;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;

use super::{ApiConfig, Config, DEFAULT_PINS, workers};

#[test]
fn each_sandbox_value_selects_its_mode_and_others_are_refused() {
    use metadata_datapath::sandbox::SandboxMode;
    for (text, mode) in [("on", SandboxMode::On), ("log", SandboxMode::Log), ("off", SandboxMode::Off)] {
        let config: Config = serde_yaml::from_str(&format!("sandbox: {text}")).expect(text);
        assert_eq!(SandboxMode::from(config.sandbox), mode);
    }
    assert!(serde_yaml::from_str::<Config>("sandbox: enforce").is_err());
}

#[test]
fn an_empty_file_means_all_defaults() {
    for text in ["", "\n", "# nothing yet\n"] {
        assert_eq!(Config::parse(text).expect("defaults"), Config::default());
    }
}

#[test]
fn the_kernel_answers_without_an_agent_for_three_seconds_to_an_hour() {
    let cases =
        [("3", Some(3)), ("3600", Some(3_600)), ("2", None), ("3601", None), ("-1", None), ("long", None)];
    for (text, expected) in cases {
        let config = Config::parse(&format!("answer_without_agent_seconds: {text}\n"));
        assert_eq!(config.ok().map(|config| config.answer_without_agent_seconds), expected, "{text}");
    }
}

#[test]
fn workers_range_from_one_to_the_maximum_number_of_hubs() {
    let cases = [("1", Some(1)), ("32", Some(32)), ("0", None), ("33", None), ("-1", None), ("many", None)];
    for (text, expected) in cases {
        assert_eq!(workers(text).ok(), expected, "{text}");
        let config = Config::parse(&format!("workers: {text}\n"));
        assert_eq!(config.ok().map(|config| config.workers), expected, "{text}");
    }
}

#[test]
fn record_memory_accepts_bytes_with_or_without_a_unit() {
    for (text, bytes) in [
        ("536870912", Some(Some(512 << 20))),
        ("512MiB", Some(Some(512 << 20))),
        ("2 GiB", Some(Some(2 << 30))),
        ("65536KiB", Some(Some(64 << 20))),
        ("null", Some(None)),
        ("512M", None),
        ("much", None),
        ("-1", None),
        ("99999999999999999999GiB", None),
    ] {
        let config = Config::parse(&format!("record_memory: {text}\n"));
        assert_eq!(config.ok().map(|config| config.record_memory), bytes, "{text}");
    }
}

#[test]
fn null_turns_pins_off() {
    let cases = [
        ("hub: x\n", Some(DEFAULT_PINS)),
        ("pins: null\n", None),
        ("pins: /sys/fs/bpf/two\n", Some("/sys/fs/bpf/two")),
    ];
    for (text, pins) in cases {
        let config = Config::parse(text).expect(text);
        assert_eq!(config.pins.as_deref(), pins.map(Path::new), "{text}");
    }
}

#[test]
fn fields_that_a_file_omits_have_their_defaults() {
    let config =
        Config::parse("limits: {burst: 7}\nports: [{ifname: t0, mac: '52:54:00:00:00:01'}]\n").unwrap();
    assert_eq!(config.limits, PortLimits { burst: 7, ..PortLimits::default() });
    assert_eq!(config.ports, ["t0=52:54:00:00:00:01".parse().unwrap()]);
}

#[test]
fn addresses_in_the_file_replace_the_default_and_set_the_next_hop() {
    let cases: [(&str, usize, &[Ipv4Addr]); 4] = [
        ("hub: x\n", 9, &[addresses::SCALEWAY_NEXT_HOP]),
        ("addresses: [169.254.169.254, 'fd00:ec2::254']\n", 2, &[]),
        ("addresses: [169.254.42.42]\n", 1, &[addresses::SCALEWAY_NEXT_HOP]),
        ("addresses: [169.254.42.42]\narp_only: []\n", 1, &[]),
    ];
    for (text, served, next_hops) in cases {
        let config = Config::parse(text).expect(text);
        config.validate().expect(text);
        assert_eq!((config.addresses.len(), &config.next_hops()[..]), (served, next_hops), "{text}");
    }
}

#[test]
fn metadata_limits_become_limits_of_a_record() {
    for (text, keys, chars) in [("hub: x\n", 16, 256), ("metadata: {keys: 64}\n", 64, 256)] {
        let config = Config::parse(text).expect(text);
        config.validate().expect(text);
        let limits = config.record_limits();
        assert_eq!((limits.metadata_keys, limits.metadata_chars), (keys, chars), "{text}");
    }
}

#[test]
fn parse_errors_name_the_field_and_the_line() {
    let cases = [
        ("hub: x\nlimit: {}\n", "line 2", "limit"),
        ("hub: x\nsteer: tc\n", "line 2", "steer"),
        ("limits:\n  burst: -1\n", "line 2", "limits.burst"),
        ("ports:\n- {ifname: a-name-that-is-too-long}\n", "line 2", "ports[0]"),
        ("ports:\n- {ifname: t0, mac: '53:54:00:00:00:01'}\n", "line 2", "group address"),
    ];
    for (text, line, field) in cases {
        let error = Config::parse(text).expect_err(text).to_string();
        assert!(error.contains(line) && error.contains(field), "{text:?} gave: {error}");
    }
}

#[test]
fn values_out_of_range_are_refused_by_field() {
    type Spoil = fn(&mut Config);
    let cases: [(&str, Spoil); 15] = [
        ("record_memory", |c| c.record_memory = Some(1 << 20)),
        ("rotate_token_key_days", |c| c.rotate_token_key_days = 0),
        ("audit.sample", |c| c.audit.sample = 0),
        ("addresses", |c| c.addresses.push("255.255.255.255".parse().unwrap())),
        ("addresses", |c| c.addresses.extend((1..=31).map(|n| IpAddr::from([10, 0, 0, n])))),
        ("arp_only", |c| c.arp_only = Some(vec![addresses::METADATA])),
        ("arp_only", |c| c.arp_only = Some(vec!["224.0.0.1".parse().unwrap()])),
        ("addresses", |c| c.addresses.push("0.0.0.0".parse().unwrap())),
        ("addresses", |c| c.addresses.push("ff02::1".parse().unwrap())),
        ("addresses", |c| c.addresses.push(addresses::METADATA.into())),
        ("hub", |c| c.hub = "x".repeat(12)),
        ("hub", |c| c.hub = "a/b".into()),
        ("addresses", |c| c.addresses.clear()),
        ("limits.burst", |c| c.limits.burst = 0),
        ("api.instances", |c| c.api = Some(ApiConfig { instances: 0, ..ApiConfig::default() })),
    ];
    for (field, spoil) in cases {
        let mut config = Config::default();
        spoil(&mut config);
        let error = config.validate().expect_err(field).to_string();
        assert!(error.starts_with(field), "{error}");
    }
}

/// The JSON pointers (RFC 6901) to all numbers of a document.
#[cfg(feature = "kubevirt")]
fn numbers(document: &Value, at: String) -> Vec<String> {
    match document {
        Value::Number(_) => vec![at],
        Value::Object(members) => {
            members.iter().flat_map(|(name, member)| numbers(member, format!("{at}/{name}"))).collect()
        }
        _ => Vec::new(),
    }
}

#[cfg(feature = "kubevirt")]
#[test]
fn each_number_has_a_bound_that_the_error_says() {
    let sections = "record_memory: 512MiB\nidentity: {issuer: 'https://a', keys: /k}\napi: {}\nkubevirt: {}\n\
                    proxmox: {}\nopenstack: {}\n";
    let config = Config::parse(sections).expect("all sections");
    config.validate().expect("all defaults");
    let document = serde_json::to_value(&config).expect("JSON");
    let numbers = numbers(&document, String::new());
    // A number in a section that is missing above would have no test.
    let fields = include_str!("../../../docs/src/reference/configuration-fields.md").lines();
    let cells = fields.map(|line| line.split('|').map(str::trim).collect::<Vec<_>>());
    for cells in cells.filter(|cells| cells.get(2) == Some(&"number")) {
        let name = cells[1].replace('`', "");
        assert!(numbers.iter().any(|pointer| pointer.ends_with(&format!("/{name}"))), "{name}");
    }
    for pointer in numbers {
        let refused = |number: u64| {
            let mut document = document.clone();
            *document.pointer_mut(&pointer).expect("a number") = number.into();
            let read = Config::parse(&document.to_string()).map_err(|error| error.to_string());
            read.and_then(|config| config.validate().map_err(|error| error.to_string())).err()
        };
        // 32 bits of memory are little.
        let error = refused(u32::MAX.into()).or_else(|| refused(i64::MAX as u64)).expect(&pointer);
        let field = pointer[1..].replace('/', ".");
        let bound = ["at most ", " to ", " or "].iter().any(|word| {
            error.split_once(word).is_some_and(|(_, rest)| rest.starts_with(|c: char| c.is_ascii_digit()))
        });
        assert!(error.contains(&field) && bound, "{field}: {error}");
    }
}

#[test]
fn settings_of_openstack_that_exclude_each_other_are_refused() {
    for (text, refused) in [
        ("{}", None),
        ("{southbound: 'tcp:10.0.0.1:6642', chassis: n1}", None),
        ("{instances: libvirt}", None),
        ("{instances: libvirt, domains: /run/elsewhere}", None),
        ("{domains: /run/elsewhere}", Some("openstack.domains: expected nothing, or `instances: libvirt`")),
        ("{instances: libvirt, ovsdb: 'tcp:10.0.0.1:6640'}", Some("openstack.ovsdb: expected nothing")),
        (
            "{instances: libvirt, southbound: 'tcp:10.0.0.1:6642'}",
            Some("openstack.southbound: expected nothing"),
        ),
        ("{instances: libvirt, tls: {ca: /ca.pem}}", Some("openstack.tls: expected nothing")),
        ("{instances: libvirt, chassis: n1}", Some("asks no database")),
    ] {
        let config = Config::parse(&format!("openstack: {text}\n")).expect(text);
        let found = config.validate().err().map(|error| error.to_string());
        let is_as_expected = match (&found, refused) {
            (Some(found), Some(words)) => found.contains(words),
            (found, refused) => found.is_none() && refused.is_none(),
        };
        assert!(is_as_expected, "{text}: {found:?}");
    }
    assert!(Config::parse("openstack: {instances: ovs}\n").is_err());
}
