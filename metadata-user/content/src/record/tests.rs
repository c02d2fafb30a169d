//! Which records the parser accepts and refuses, and the texts of its errors and warnings.

use proptest::prelude::*;

use super::network::HashPolicy;
use super::values::Cidr;
use super::{Record, RecordError, RecordLimits, Role, USER_DATA_DEFAULT, credentials};

const FULL: &str = include_str!("../../../../tests/vectors/record.yaml");

fn edited(from: &str, to: &str) -> String {
    assert!(FULL.contains(from), "`{from}` is not in the record");
    FULL.replacen(from, to, 1)
}

fn full() -> Record {
    Record::parse("full.yaml", FULL).expect("the full record is good").0
}

/// The full record as JSON.
fn json() -> String {
    let value: serde_json::Value = serde_yaml::from_str(FULL).expect("the full record is YAML");
    serde_json::to_string_pretty(&value).expect("a value can be written")
}

#[test]
fn the_full_record_is_accepted_without_a_warning() {
    let (record, warnings) = Record::parse("full.yaml", FULL).expect("the full record is good");
    assert_eq!(warnings, []);
    assert_eq!(record.hostname.fqdn(), "web-1.example.internal");
    assert_eq!(
        (record.role(0), record.role(1), record.role(2)),
        (Role::Public, Role::Private, Role::Private)
    );
}

#[test]
fn json_and_yaml_read_as_the_same_record() {
    let (record, _) = Record::parse("full.json", &json()).expect("the full record is good as JSON");
    assert_eq!(record, full());
    let astral = json().replacen("\"name\": \"web-1\"", r#""name": "\ud83d\ude80""#, 1);
    let (record, _) = Record::parse("full.json", &astral).expect("JSON escapes characters by surrogates");
    assert_eq!(record.vm.name.as_str(), "🚀");
}

#[test]
fn an_error_names_the_place_the_expected_and_the_found_value() {
    const VENDOR: &str = "vendor_data: {text: \"#cloud-config\\n{}\\n\"}";
    let cases = [
        ("schema: vmrecord/1", "schema: vmrecord/2", "r.yaml:1:9: schema: expected"),
        ("schema: vmrecord/1\n", "", "r.yaml:1:1: the field `schema` is missing"),
        (
            "generation: 7",
            "generation: -7",
            "r.yaml:2:13: generation: expected a whole number, 0 or more, found `-7`",
        ),
        (
            "  name: web-1",
            "  nmae: web-1",
            "r.yaml:5:3: vm.nmae: unknown field; did you mean `name`? The fields here are `uuid`",
        ),
        ("  name: web-1", "  name: web-1\n  name: web-2", "r.yaml:6:3: vm.name: given twice; keep one"),
        ("vm:", "vm: 3\nx:", "r.yaml:3:5: vm: expected a mapping, found a number"),
        ("short: web-1", "short: web_1", "r.yaml:11:19: hostname.short: expected a host name label"),
        (
            "52:54:00:12:34:56",
            "52:54:00:12:34",
            "r.yaml:27:10: network.nics[0].mac: expected the MAC address",
        ),
        (
            "52:54:00:12:34:56",
            "01:54:00:12:34:56",
            "r.yaml:27:10: network.nics[0].mac: expected the MAC address of one NIC, whose first byte is even",
        ),
        (
            "52:54:00:12:34:57",
            "52:54:00:12:34:56",
            "r.yaml:35:10: network.nics[1].mac: expected each MAC once",
        ),
        ("id: n1", "id: n0", "r.yaml:33:9: network.nics[1].id: expected each id once"),
        (
            "\"000000000000\"",
            "12",
            "r.yaml:10:41: vm.project.account: expected an account number of 12 digits",
        ),
        (
            "mtu: 1500",
            "mtu: 65536",
            "r.yaml:28:10: network.nics[0].mtu: expected an MTU from 68 to 65535 bytes, found",
        ),
        (
            "10.0.2.15/24",
            "10.0.2.15",
            "r.yaml:32:32: network.nics[0].addresses[0].address: expected an address with",
        ),
        (
            "10.0.2.15/24",
            "2001:db8::1/64",
            "r.yaml:32:32: network.nics[0].addresses[0].address: expected an IPv4",
        ),
        (
            "hop_limit: 1",
            "hop_limit: 65",
            "r.yaml:50:14: serve.hop_limit: expected a hop limit from 1 to 64, found 65",
        ),
        (
            "absent_seed: 204",
            "absent_seed: 200",
            "r.yaml:51:16: serve.absent_seed: expected 204 or 404, found 200",
        ),
        ("absent_seed: 204", "dialects: [lxd]", "r.yaml:51:14: serve.dialects[0]: expected one"),
        ("AQEBAQ", "A?", "r.yaml:43:23: random_seed.base64: expected standard base64 with padding"),
        (VENDOR, "vendor_data: {}", "r.yaml:20:14: vendor_data: expected exactly one of"),
        (
            VENDOR,
            "vendor_data: {text: a, base64: YQ==}",
            "r.yaml:20:14: vendor_data: expected exactly one of",
        ),
        (
            VENDOR,
            "vendor_data: {source: {file: ../x}}",
            "r.yaml:20:30: vendor_data.source.file: expected a path relative",
        ),
        (
            VENDOR,
            "vendor_data: {source: {file: /x}}",
            "r.yaml:20:30: vendor_data.source.file: expected a path relative",
        ),
        ("{role: web}", "{role: web, role: db}", "r.yaml:41:23: metadata.role: given twice; keep one"),
        (
            "metadata: {role: web}",
            "sinks: {ready: http://127.0.0.1/}",
            "r.yaml:41:16: sinks.ready: expected `file:` or `unix:` and an absolute path",
        ),
        ("{role: web}", "{ro le: web}", "r.yaml:41:19: metadata.ro le: expected a key of"),
        (
            "metadata: {role: web}",
            "identity: {subject: \"vm {owner}\"}",
            "r.yaml:41:21: identity.subject: expected 1 to 255 letters, digits and",
        ),
        (
            "2030-01-01",
            "2030-13-01",
            "r.yaml:45:115: credentials.iam.expires: expected a time as in RFC 3339",
        ),
        ("name: default,", "name: a=b,", "r.yaml:18:10: ssh_keys[0].name: expected a key name"),
        (
            "  nics:",
            "  mode: raw\n  nics:",
            "r.yaml:22:3: network.raw: expected `raw` with mode raw, found none; write",
        ),
        (
            "  nics:",
            "  mode: raw\n  network_data: {links: [], networks: []}\n  nics:",
            "r.yaml:25:17: network.network_data: expected a JSON object with lists `links` and `networks`",
        ),
        (
            "  nics:",
            "  mode: raw\n  network_data: \"links: [{id: a}]\"\n  nics:",
            "r.yaml:25:17: network.network_data: expected a JSON object with lists `links` and `networks`",
        ),
    ];
    let wrong = cases.into_iter().filter_map(|(from, to, wanted)| {
        let refused = Record::parse("r.yaml", &edited(from, to)).expect_err(to).to_string();
        (!refused.starts_with(wanted)).then(|| format!("{to}\nwanted {wanted}\ngot    {refused}"))
    });
    let wrong: Vec<_> = wrong.collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn links_of_vlans_and_bonds_have_no_loop_and_a_nic_is_in_one_bond() {
    let with = |nics: &str| edited("metadata: {role: web}", &format!("{nics}metadata: {{role: web}}"));
    let vlan =
        |id: &str, link: &str| format!("  - {{id: {id}, name: {id}, vlan: {{link: {link}, id: 7}}}}\n");
    let bond = |id: &str, links: &str| {
        format!("  - {{id: {id}, name: {id}, bond: {{links: [{links}], mode: active-backup}}}}\n")
    };
    for (nics, wanted) in [
        (
            [vlan("a", "b"), vlan("b", "a")],
            "network.nics[2]: expected a VLAN or bond of NICs below it, found `a`",
        ),
        ([bond("a", "n0, b"), vlan("b", "a")], "network.nics[2]: expected a VLAN or bond of NICs below it"),
        (
            [bond("a", "n0, b"), bond("b", "n1, a")],
            "network.nics[2]: expected a VLAN or bond of NICs below it",
        ),
        (
            [bond("a", "n0, n1"), bond("b", "n1")],
            "network.nics[3].bond.links[0]: expected a NIC that is in no other bond, found `n1`, which is in `a`",
        ),
        (
            [bond("a", "n0, n0"), vlan("b", "a")],
            "network.nics[2].bond.links[1]: expected a NIC that is in no other bond, found `n0` twice",
        ),
    ] {
        let text = with(&nics.concat());
        let refused = Record::parse("r.yaml", &text).expect_err(wanted).to_string();
        assert!(refused.contains(wanted), "wanted {wanted}\ngot    {refused}");
    }
    for nics in [
        [bond("a", "n0, n1"), vlan("b", "a")],
        [vlan("b", "a"), bond("a", "n0, n1")],
        [bond("a", "n0"), bond("b", "n1")],
        [vlan("a", "n0"), vlan("b", "n0")],
        [vlan("a", "n0"), vlan("b", "a")],
    ] {
        let nics = nics.concat();
        Record::parse("r.yaml", &with(&nics)).expect(&nics);
    }
}

#[test]
fn a_hash_policy_is_one_of_the_bonding_driver() {
    let with = |policy: &str| {
        let bond = format!("{{links: [n0], mode: balance-xor, xmit_hash_policy: {policy}}}");
        let nic = format!("  - {{id: bond0, bond: {bond}}}\nmetadata: {{role: web}}");
        Record::parse("r.yaml", &edited("metadata: {role: web}", &nic))
    };
    for policy in ["layer2", "layer2+3", "layer3+4", "encap2+3", "encap3+4", "vlan+srcmac"] {
        let (record, _) = with(policy).expect(policy);
        let bond = record.network.nics[2].bond.as_ref().expect("a bond");
        assert_eq!(bond.xmit_hash_policy.map(HashPolicy::as_str), Some(policy));
        let json = record.to_json().expect("JSON");
        assert_eq!(Record::parse("r.json", &json).expect(policy).0.network, record.network, "{policy}");
    }
    for policy in ["layer4", "Layer2", "layer3-4"] {
        let refused = with(policy).expect_err(policy).to_string();
        assert!(refused.contains("bond.xmit_hash_policy: expected one of `layer2`, "), "{refused}");
    }
}

#[test]
fn a_network_text_that_expands_beyond_its_budget_is_refused() {
    let list = |item: &str| vec![item; 24].join(",");
    let mut text = format!("{{version: 2, a: &a [{}]", list("x"));
    for (name, below) in [("b", "a"), ("c", "b"), ("d", "c"), ("e", "d")] {
        text.push_str(&format!(", {name}: &{name} [{}]", list(&format!("*{below}"))));
    }
    text.push_str("}\n");
    assert!(text.len() < 810, "{}", text.len());
    assert!(!super::is_network_config(&text.clone().into()));
    let with = |raw: &str| edited("  nics:", &format!("  mode: raw\n  raw: {raw:?}\n  nics:"));
    let refused = Record::parse("r.yaml", &with(&text)).expect_err("too much").to_string();
    assert!(refused.starts_with("r.yaml:25:8: network.raw: expected a mapping"), "{refused}");
    let (record, _) = Record::parse("r.yaml", &with("{version: 2, a: &a [x], b: *a}")).expect("little");
    assert_eq!(
        record.network.raw_document(),
        Some(&serde_json::json!({"version": 2, "a": ["x"], "b": ["x"]}))
    );
}

#[test]
fn errors_in_json_have_line_numbers() {
    for (from, to, wanted) in [
        ("52:54:00:12:34:56", "x", "r.json:58:18: network.nics[0].mac: expected the MAC"),
        (
            "52:54:00:12:34:57",
            "52:54:00:12:34:56",
            "r.json:72:34: network.nics[1].mac: expected each MAC once",
        ),
        ("\"name\": \"eth0\"", "\"nmae\": 1", "r.json:60:14: network.nics[0].nmae: unknown field"),
        ("{", "{,", "r.json:1:2: key must be a string"),
    ] {
        let refused = Record::parse("r.json", &json().replacen(from, to, 1)).expect_err(to).to_string();
        assert!(refused.starts_with(wanted), "{to}\nwanted {wanted}\ngot    {refused}");
    }
}

#[test]
fn ends_of_lines_that_belong_to_the_kind_cause_no_warning() {
    const VENDOR: &str = "text: \"#cloud-config\\n{}\\n\"";
    for text in ["#ps1_sysnative\\r\\nexit\\r\\n", "MIME-Version: 1.0\\r\\n\\r\\n", "#!/bin/sh\\necho\\r\\n"]
    {
        let record = edited(VENDOR, &format!("text: \"{text}\""));
        assert_eq!(Record::parse("r.yaml", &record).expect(text).1, [], "{text}");
    }
}

#[test]
fn a_probable_mistake_causes_a_warning_with_its_place() {
    const VENDOR: &str = "text: \"#cloud-config\\n{}\\n\"";
    const SECOND: &str = "- {method: static, address: 192.168.7.5/24}";
    for (from, to, wanted) in [
        ("imdsv2: optional", "imdsv2: required", "r.yaml:49:11: serve.imdsv2: protects nothing"),
        (
            "date_tree: ec2",
            "dialects: [exoscale]",
            "r.yaml:48:3: serve.date_tree: the tree below /latest is not Exoscale's",
        ),
        (
            "date_tree: ec2",
            "dialects: [ec2]\n  date_tree: cloudstack",
            "r.yaml:49:14: serve.date_tree: the tree below /latest is not EC2's",
        ),
        (
            "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d",
            "00000000-0000-0000-0000-000000000000",
            "r.yaml:4:9: vm.uuid: all zeros",
        ),
        (
            VENDOR,
            "text: \"#cloud_config\\n{}\\n\"",
            "r.yaml:20:14: vendor_data: begins with `#cloud_config`, so that cloud-init does not",
        ),
        (VENDOR, "text: abcd", "r.yaml:20:21: vendor_data.text: the text is also valid base64"),
        (
            VENDOR,
            "text: \"\\uFEFF#cloud-config\\n{}\\n\"",
            "r.yaml:20:14: vendor_data: begins with a byte order mark",
        ),
        (
            VENDOR,
            "text: \"#!/bin/sh\\r\\necho\\r\\n\"",
            "r.yaml:20:14: vendor_data: the first line ends with CR LF",
        ),
        (VENDOR, "base64: 77u/", "r.yaml:20:14: vendor_data: is a byte order mark only"),
        (
            "{role: web}",
            "{region: x}",
            "r.yaml:41:20: metadata.region: NoCloud's meta-data reserves this key",
        ),
        (
            VENDOR,
            "base64: /wA=",
            "r.yaml:20:14: vendor_data: neither UTF-8 nor gzip: empty in the documents of",
        ),
        (
            "vendor_data: {text",
            "vendor_data2: {base64: /wA=}\nvendor_data: {text",
            "r.yaml:20:15: vendor_data2: neither UTF-8 nor gzip: empty in the documents of OpenStack,",
        ),
        (
            "{role: web}",
            "{user_data: x}",
            "r.yaml:41:23: metadata.user_data: Oracle's metadata reserves this key",
        ),
        (SECOND, "  []", "r.yaml:33:5: network.nics[1]: no addresses"),
        ("  nics:", "  raw: {version: 2}\n  nics:", "r.yaml:24:8: network.raw: not used"),
        ("  nics:", "  network_data: {}\n  nics:", "r.yaml:24:17: network.network_data: not used"),
        ("    name: eth1\n", "", "r.yaml:33:5: network.nics[1]: no `name`"),
        ("absent_seed: 204", "dialects: []", "r.yaml:51:13: serve.dialects: an empty list"),
        ("absent_seed: 204", "limits: {conns: 257}", "r.yaml:51:19: serve.limits.conns: more than the VM's"),
        ("{role: web}", "{_index: x}", "r.yaml:41:20: metadata._index: not served as an instance tag by ec2"),
        (
            "{role: web}",
            "{role: \"a\\nb\"}",
            "r.yaml:41:18: metadata.role: not served as an instance tag by ec2",
        ),
    ] {
        let (_, warnings) = Record::parse("r.yaml", &edited(from, to)).expect(to);
        let texts: Vec<_> = warnings.iter().map(ToString::to_string).collect();
        assert!(texts.len() == 1 && texts[0].starts_with(wanted), "{to}\nwanted {wanted}\ngot    {texts:?}");
    }
}

#[test]
fn a_vlan_or_bond_without_a_name_causes_a_warning_if_linux_does_not_take_its_id() {
    const VLAN: &str = "vlan: {link: n0, id: 7}";
    const BOND: &str = "bond: {links: [n0], mode: active-backup}";
    for (id, kind, wanted) in [
        ("v7", VLAN, None),
        ("bond0", BOND, None),
        ("eth0.7", VLAN, None),
        ("fifteen-letters", VLAN, None),
        ("sixteen--letters", VLAN, Some("add `name: vlan7`")),
        ("sixteen--letters", BOND, Some("add `name: bond2`")),
        ("'eth0:7'", VLAN, Some("`eth0:7` is not an interface name (1 to 15 printable")),
        ("'eth0:7', name: v7", VLAN, None),
    ] {
        let addresses = "addresses: [{method: dhcp4}]";
        let nic = format!("  - {{id: {id}, {kind}, {addresses}}}\nmetadata: {{role: web}}");
        let (_, warnings) = Record::parse("r.yaml", &edited("metadata: {role: web}", &nic)).expect(id);
        let texts: Vec<_> = warnings.iter().map(ToString::to_string).collect();
        let is_right = match wanted {
            None => texts.is_empty(),
            Some(wanted) => {
                let start = "r.yaml:41:5: network.nics[2]: no `name`: the guest creates";
                matches!(&texts[..], [text] if text.starts_with(start) && text.contains(wanted))
            }
        };
        assert!(is_right, "{id} {kind}: {texts:?}");
    }
}

#[test]
fn an_unknown_lease_causes_a_warning_for_digitalocean() {
    let known = "{method: dhcp4, address: 10.0.2.15/24, gateway: 10.0.2.2, public: 203.0.113.7}";
    for (dialect, addresses, warns) in [
        ("digitalocean", "{method: dhcp4}", true),
        ("digitalocean", "{method: slaac}", true),
        ("digitalocean", known, false),
        ("upcloud", "{method: dhcp4}", false),
    ] {
        let text =
            edited("absent_seed: 204", &format!("dialects: [{dialect}]")).replacen(known, addresses, 1);
        let (_, warnings) = Record::parse("r.yaml", &text).expect("a good record");
        let is_named =
            |text: String| text.contains("network.nics[0]: no known address: DigitalOcean's clients");
        let found = warnings.iter().any(|warning| is_named(warning.to_string()));
        assert_eq!(found, warns, "{dialect} {addresses}: {warnings:?}");
    }
}

#[test]
fn a_vlan_or_bond_causes_a_warning_for_nwcs() {
    let addresses = "addresses: [{method: dhcp4}]";
    for (dialects, kind, warns) in [
        ("nwcs", "vlan: {link: n0, id: 7}", true),
        ("vultr, nwcs", "bond: {links: [n0], mode: active-backup}", true),
        ("nwcs", "mac: '52:54:00:12:34:58'", false),
        ("vultr", "vlan: {link: n0, id: 7}", false),
    ] {
        let nic = format!("  - {{id: n2, name: upper, {kind}, {addresses}}}\nmetadata: {{role: web}}");
        let text = edited("metadata: {role: web}", &nic);
        let text = text.replacen("absent_seed: 204", &format!("dialects: [{dialects}]"), 1);
        let (_, warnings) = Record::parse("r.yaml", &text).expect("a good record");
        let is_named = |text: String| text.contains("network.nics[2]: not in NWCS's document");
        let found = warnings.iter().any(|warning| is_named(warning.to_string()));
        assert_eq!(found, warns, "{dialects} {kind}: {warnings:?}");
    }
}

#[test]
fn a_key_that_cannot_end_a_path_causes_a_warning_for_gce() {
    for (key, left_out) in [(".", true), ("..", true), ("...", false), (".a", false)] {
        let (_, warnings) =
            Record::parse("r.yaml", &edited("{role: web}", &format!("{{{key}: x}}"))).expect(key);
        let texts: Vec<_> = warnings.iter().map(ToString::to_string).collect();
        let warned = texts.iter().any(|text| text.contains("left out of GCE's attributes"));
        assert_eq!(warned, left_out, "{key}: {texts:?}");
    }
}

#[test]
fn credential_files_are_inside_the_records_directory_and_role_names_fit_a_path() {
    const TOKEN: &str = "{text: eyJhbGciOiJub25lIn0.e30., expires: \"2030-01-01T00:00:00Z\"}";
    let (_, warnings) =
        Record::parse("r.yaml", &edited(TOKEN, "{source: {file: sa/token}}")).expect("a source");
    assert_eq!(warnings, []);
    for (from, to, wanted) in [
        (
            TOKEN,
            "{source: {file: ../token}}",
            "credentials.service_account.token.source.file: expected a path",
        ),
        ("role: app", "role: a/b", "credentials.iam.role: expected a role name"),
        ("role: app", "role: ..", "credentials.iam.role: expected a role name"),
    ] {
        let refused = Record::parse("r.yaml", &edited(from, to)).expect_err(to).to_string();
        assert!(refused.contains(wanted), "{refused}");
    }
}

#[test]
fn a_network_is_its_address_without_the_host_bits() {
    for (text, network, mask) in [
        ("192.0.2.77/26", "192.0.2.64/26", "255.255.255.192"),
        ("192.0.2.77/32", "192.0.2.77/32", "255.255.255.255"),
        ("192.0.2.77/0", "0.0.0.0/0", "0.0.0.0"),
        ("10.1.2.3/9", "10.0.0.0/9", "255.128.0.0"),
        ("2001:db8::ff/120", "2001:db8::/120", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ff00"),
        ("2001:db8::ff/0", "::/0", "::"),
        ("2001:db8::ff/128", "2001:db8::ff/128", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"),
    ] {
        let cidr: Cidr = serde_yaml::from_str(text).expect("a network");
        assert_eq!((cidr.network().to_string(), cidr.netmask().to_string()), (network.into(), mask.into()));
    }
}

#[test]
fn every_limit_is_enforced_and_named_in_the_error() {
    let many = |line: &str, n: usize| line.repeat(n);
    let key = "- {name: k, key: ssh-ed25519 AAAA}\n";
    let nics: String = (0..33)
        .map(|n| {
            format!("  - {{id: x{n}, mac: \"52:54:00:00:00:{n:02x}\", addresses: [{{method: dhcp4}}]}}\n")
        })
        .collect();
    let metadata: String = (0..17).map(|n| format!("k{n}: v, ")).collect();
    let cases = [
        ("  nics:\n", format!("  nics:\n{nics}"), "at most 32 NICs, found 35"),
        ("ssh_keys:\n", format!("ssh_keys:\n{}", many(key, 128)), "at most 128 keys, found 129"),
        ("[web]", format!("[{}]", many("a, ", 65)), "at most 64 labels, found 65"),
        ("[10.0.2.3]", format!("[{}]", many("10.0.2.3, ", 17)), "at most 16 resolvers, found 17"),
        ("[example.internal]", format!("[{}]", many("a.b, ", 17)), "at most 16 search domains, found 17"),
        ("{role: web}", format!("{{{metadata}}}"), "at most 16 keys, found 17"),
        ("{role: web}", format!("{{k: {}}}", many("é", 257)), "at most 256 characters, found 257"),
        (
            "- {method: static, address: 192.168.7.5/24}",
            many("- {method: dhcp4}\n    ", 33),
            "at most 32 addresses, found 33",
        ),
        (
            "    role: private",
            format!("    routes:\n{}", many("    - {to: 10.0.0.0/8, via: 10.0.0.1}\n", 65)),
            "at most 64 routes, found 65",
        ),
        (
            "labels:",
            format!("disks: [{}]\nlabels:", many("{type: d, bus: b, address: a}, ", 65)),
            "at most 64 disks",
        ),
        (
            "labels:",
            format!("files: [{}]\nlabels:", many("{path: /x, base64: YQ==}, ", 65)),
            "at most 64 files",
        ),
        (
            "labels:",
            format!("files: [{{path: /x, base64: {}}}]\nlabels:", many("AAAA", 349_526)),
            "at most 1048576 bytes in all files",
        ),
        (
            "{text: \"#cloud-config\\n{}\\n\"}",
            format!("{{text: \"{}\"}}", many("x", 65_537)),
            "at most 65536 bytes, found 65537",
        ),
        ("hop_limit: 1", "limits: {user_data: 1048577}".into(), "at most 1048576 bytes, found 1048577"),
        (
            "short: web-1, domain: example.internal",
            format!("short: w, domain: {}x", many("a.", 126)),
            "at most 253",
        ),
    ];
    for (from, to, wanted) in cases {
        let refused = Record::parse("r.yaml", &edited(from, &to)).expect_err(wanted).to_string();
        assert!(refused.contains(wanted), "wanted {wanted}\ngot {refused}");
    }
    let limits = RecordLimits { record_bytes: FULL.len() - 1, ..RecordLimits::default() };
    let refused = Record::parse_within(&limits, "r.yaml", FULL);
    assert!(matches!(refused, Err(RecordError::TooLarge { limit, .. }) if limit < FULL.len()));
}

#[test]
fn a_record_can_raise_its_user_data_limit() {
    let large = "x".repeat(200_000);
    let text = edited("{text: \"#cloud-config\\n{}\\n\"}", &format!("{{text: \"{large}\\n\"}}"));
    assert!(large.len() > usize::try_from(USER_DATA_DEFAULT).expect("it fits"));
    assert!(Record::parse("r.yaml", &text).is_err());
    let raised = text.replacen("hop_limit: 1", "limits: {user_data: 1048576}", 1);
    assert!(Record::parse("r.yaml", &raised).is_ok());
}

#[test]
fn secrets_appear_neither_in_debug_output_nor_in_refusals() {
    let text = edited("admin: {user: alice}", "admin: {user: alice, password: hunter2}");
    let (record, _) = Record::parse("r.yaml", &text).expect("a password is good");
    let debug = format!("{record:?}");
    for secret in ["hunter2", "sk-example", "st-example", "eyJhbGciOiJub25lIn0", "runcmd"] {
        assert!(!debug.contains(secret), "{secret} is in the debug output");
    }
    let refused = Record::parse("r.yaml", &edited("{user: alice}", "{password: \"hunter2\\0\"}"));
    assert!(!refused.expect_err("a NUL is no password").to_string().contains("hunter2"));
}

#[test]
fn a_secret_of_the_wrong_type_is_not_in_the_refusal() {
    let record = |field: &str| format!("schema: vmrecord/1\n{field}\n");
    for (field, says) in [
        ("user_data: \"hunter2, expected \\\"x\\\" \"", "user_data: expected a mapping, found some text"),
        ("vendor_data: hunter2", "vendor_data: expected a mapping, found some text"),
        ("random_seed: [hunter2]", "random_seed: expected a mapping, found a list"),
        ("admin: hunter2", "admin: expected a mapping, found some text"),
        ("credentials: {iam: hunter2}", "credentials.iam: expected a mapping, found some text"),
    ] {
        for text in [record(field), format!("{{{}}}", record(field).trim().replace('\n', ", "))] {
            let said = Record::parse("r.yaml", &text).expect_err(field).to_string();
            assert!(said.contains(says), "{field}: {said}");
            assert!(!said.contains("hunter2"), "{field}: {said}");
        }
    }
}

#[test]
fn derived_ids_match_their_published_values() {
    let text = FULL
        .replace("  ec2_id: i-0f5e8a1b2c3d4e5f6\n  numeric_id: 12345\n", "")
        .replace("id: ami-00000001", "id: debian-13");
    let (record, _) = Record::parse("derived.yaml", &text).expect("ids may be left out");
    assert_eq!(record.ec2_id(), "i-f86efda6b48bc89cd");
    assert_eq!(record.reservation_id(), "r-f86efda6b48bc89cd");
    assert_eq!(record.ami_id().as_deref(), Some("ami-6a6db9d3e470d4239"));
    assert_eq!(record.numeric_id(), 2_865_880_650_114_801);
    assert_eq!(record.network.nics[0].eni_id().as_deref(), Some("eni-d4dd82cf2995e2454"));
    assert_eq!(record.network.nics[0].subnet_id().as_deref(), Some("subnet-0cf8aa895e4511bb3"));
    assert_eq!(record.vpc_id(), "vpc-ab907125a170e040f");
    assert_eq!(record.region_code(), "LOC");
    assert_eq!(record.gce_zone(), "projects/1/zones/local-a");
    assert_eq!(record.gce_machine_type(), "projects/1/machineTypes/std.small");
    assert_eq!(record.ocid(), "ocid1.instance.oc1..7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d");
}

#[test]
fn ids_in_the_record_override_derived_ones() {
    let record = full();
    assert_eq!(record.ec2_id(), "i-0f5e8a1b2c3d4e5f6");
    assert_eq!(record.numeric_id(), 12_345);
    assert_eq!(record.ami_id().as_deref(), Some("ami-00000001"));
    assert_eq!(record.instance_id(), "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d");
}

#[test]
fn a_record_can_name_the_tap_of_a_nic() {
    let text =
        edited("    role: public", "    role: public\n    port: {ifname: vnet3, netns: /proc/42/ns/net}");
    let (record, _) = Record::parse("r.yaml", &text).expect("a port is good");
    let port =
        metadata_common::port::PortName::from(record.network.nics[0].port.as_ref().expect("it was given"));
    assert_eq!(port.to_string(), "vnet3 in /proc/42/ns/net");
    for bad in [
        "{ifname: a/b}",
        "{ifname: abcdefghijklmnop}",
        "{ifname: a, netns: b/c}",
        "{netns: a}",
        "{ifname: ..}",
    ] {
        let text = edited("    role: public", &format!("    port: {bad}"));
        assert!(Record::parse("r.yaml", &text).is_err(), "{bad} was accepted");
    }
}

proptest! {
    #[test]
    fn mangled_text_never_causes_a_panic(
        edits in prop::collection::vec((0..FULL.len(), any::<u8>(), 0_usize..40), 1..12),
        json_name in any::<bool>(),
    ) {
        let mut bytes = if json_name { json().into_bytes() } else { FULL.as_bytes().to_vec() };
        for (at, byte, cut) in edits {
            let at = at.min(bytes.len() - 1);
            bytes[at] = byte;
            bytes.drain(at..(at + cut).min(bytes.len() - 1).max(at));
        }
        let name = if json_name { "mangled.json" } else { "mangled.yaml" };
        if let Err(error) = Record::parse(name, &String::from_utf8_lossy(&bytes)) {
            prop_assert!(error.to_string().starts_with("mangled."));
        }
    }
}

#[test]
fn an_unquoted_null_is_no_text() {
    let with = |name: &str, metadata: &str| {
        let text = edited("  name: web-1", &format!("  name: {name}"));
        Record::parse("r.yaml", &text.replace("{role: web}", &format!("{{role: web, nothing: {metadata}}}")))
    };
    for (name, metadata, field) in
        [("null", "x", "vm.name"), ("~", "x", "vm.name"), ("", "x", "vm.name"), ("x", "null", "metadata")]
    {
        let error = with(name, metadata).expect_err(field).to_string();
        assert!(error.contains(field) && error.contains("found null; quote it"), "{name:?}: {error}");
    }
    for text in ["'null'", "\"null\"", "nullify", "\"~\""] {
        let (record, _) = with(text, text).expect("a text");
        assert_eq!(record.vm.name.as_str(), text.trim_matches(['"', '\'']));
        assert_eq!(record.metadata.0["nothing"], text.trim_matches(['"', '\'']));
    }
    let json = json().replacen("\"name\": \"web-1\"", "\"name\": null", 1);
    let error = Record::parse("r.json", &json).expect_err("null").to_string();
    assert!(error.contains("found null; quote it"), "{error}");
}

#[test]
fn a_required_text_that_is_left_out_is_called_missing() {
    for (place, field) in [
        ("/vm", "uuid"),
        ("/vm/project", "id"),
        ("/hostname", "short"),
        ("/placement", "region"),
        ("/network/nics/0", "id"),
        ("/ssh_keys/0", "key"),
    ] {
        let mut record: serde_json::Value = serde_json::from_str(&json()).expect("JSON");
        let holder = record.pointer_mut(place).and_then(serde_json::Value::as_object_mut);
        holder.and_then(|holder| holder.remove(field)).unwrap_or_else(|| panic!("{place} has no {field}"));
        let error = Record::parse("r.json", &record.to_string()).expect_err(field).to_string();
        assert!(error.ends_with(&format!("the field `{field}` is missing")), "{place}: {error}");
    }
}

#[test]
fn systemds_credentials_are_one_of_three_forms_and_fill_user_data() {
    let with = |credentials: &str, user_data: &str| {
        let text = format!(
            "schema: vmrecord/1\ngeneration: 1\nvm: {{uuid: 7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d, name: web, project: {{id: p, \
             number: 1, account: '000000000000'}}}}\nhostname: {{short: web}}\nplacement: {{region: r, zone: z}}\n\
             network: {{nics: [{{id: n0, name: eth0, mac: '52:54:00:00:00:01', addresses: [{{method: dhcp4}}]}}]}}\n\
             systemd_credentials: {credentials}\n{user_data}"
        );
        Record::parse("r.yaml", &text)
    };
    for (credentials, expected) in [
        ("[{name: a}]", "exactly one of"),
        ("[{name: a, text: b, data: Yg==}]", "exactly one of"),
        ("[{name: a, data: ''}]", "content in `data`"),
        ("[{name: a/b, text: c}]", "a credential's name"),
        ("[{name: 'a:b', text: c}]", "a credential's name"),
        ("[{name: .., text: c}]", "a credential's name"),
        ("[{name: a, text: \"b\\0\"}]", "without NUL"),
        ("[{name: a, text: b}, {name: a, text: c}]", "each name once"),
        ("[{name: a, secret: b}]", "unknown field"),
    ] {
        let error = with(credentials, "").expect_err(credentials).to_string();
        assert!(error.contains(expected), "{credentials}: {error}");
    }
    let long = format!("[{{name: a, text: {}}}]", "b".repeat(65_530));
    assert!(with(&long, "").expect_err("too long").to_string().contains("a document of at most 65536 bytes"));
    let many: String =
        (0..=credentials::SYSTEMD_CREDENTIALS).map(|n| format!("{{name: c{n}, text: x}}, ")).collect();
    assert!(
        with(&format!("[{many}]"), "").expect_err("too many").to_string().contains("at most 64 credentials")
    );

    let good = "[{name: a, text: \"b\\n\"}, {name: c, data: AP8=}, {name: d, encrypted: AAEC}]";
    let document = r#"{"systemd.credentials":[{"name":"a","text":"b\n"},{"name":"c","data":"AP8="},{"name":"d","encrypted":"AAEC"}]}"#;
    let (record, warnings) = with(good, "").expect("a record");
    assert_eq!(record.systemd_document().as_deref(), Some(document));
    let user_data = record.user_data.as_ref().and_then(|payload| payload.bytes()).expect("user-data");
    assert_eq!(user_data, format!("#systemd-userdata\n{document}\n"));
    assert!(warnings.is_empty(), "{warnings:?}");
    assert!(!format!("{record:?}").contains("b\\n"), "a secret in a log");
    let (again, warnings) = Record::parse("r.json", &record.to_json().expect("JSON")).expect("a record");
    assert_eq!((again.user_data.as_ref().and_then(|own| own.bytes()), warnings.len()), (Some(user_data), 0));

    let (record, warnings) = with(good, "user_data: {text: \"#cloud-config\\n\"}\n").expect("a record");
    assert_eq!(record.user_data.as_ref().and_then(|own| own.text()), Some("#cloud-config\n"));
    assert!(warnings[0].to_string().contains("only GCE's attribute"), "{warnings:?}");
}
