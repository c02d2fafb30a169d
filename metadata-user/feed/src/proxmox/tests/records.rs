//! The records that configurations make.

use serde_json::{Value, json};

use super::super::drive::{Custom, snippets};
use super::super::{ProxmoxOptions, TranslationInput, translate};
use super::{GUIDE, given, made, parsed};
use metadata_content::record::event::{EVENTS_PER_VM, ScheduledEvent};
use metadata_content::record::{Record, RecordLimits};

fn record(text: &str) -> Record {
    made(text, &given()).expect("a record").record
}

fn as_json(record: &Record) -> Value {
    serde_json::from_str(&record.to_json().expect("JSON")).expect("JSON")
}

#[test]
fn the_guides_vm_makes_a_record_for_every_dialect() {
    let record = record(GUIDE);
    let found = as_json(&record);
    assert_eq!(record.vm.uuid.as_str(), "b3247ab1-1fe6-428e-965b-08a1b64a8746");
    assert_eq!((record.vm.name.as_str(), record.hostname.fqdn()), ("ubuntu2", "ubuntu2".to_owned()));
    let user_data = record.user_data.as_ref().and_then(|payload| payload.bytes()).expect("user-data");
    assert!(user_data.starts_with(b"#cloud-config\nhostname: ubuntu2\n"));
    assert_eq!(found["ssh_keys"][0]["name"], "key-0");
    assert_eq!(found["network"]["mode"], "raw");
    let raw = found["network"]["raw"].as_str().expect("text");
    assert!(raw.starts_with("version: 1\n"), "{raw}");
    let nic = &found["network"]["nics"][0];
    assert_eq!(nic["port"], json!({"ifname": "tap123i0", "netns": null}));
    assert_eq!((&nic["name"], &nic["network_id"]), (&json!("eth0"), &json!("vmbr0")));
    assert_eq!(nic["addresses"][0]["address"], "10.0.10.123/24");
    assert_eq!(nic["addresses"][0]["gateway"], "10.0.10.1");
    assert_eq!(found["network"]["dns"], json!(["192.0.2.53"]));
}

#[test]
fn sections_say_nothing_of_the_vm_as_it_runs() {
    let sections = "\n[PENDING]\nname: pending\ntemplate: 1\n\n[special:cloudinit]\nname: old\n\n[snap-1]\nname: snap\n\
                    [what is this]\nname: other\n";
    let all = parsed(&format!("{GUIDE}{sections}"));
    assert_eq!(all, parsed(GUIDE));
    assert!(!all.is_template());
    assert!(parsed("template: 1\n").is_template());
}

#[test]
fn taps_have_the_names_that_qemu_server_gives() {
    let net = |n: u32, more: &str| format!("net{n}: virtio=BC:24:11:00:00:{n:02X}{more}\n");
    let cases = [
        (net(0, ",bridge=vmbr0"), Some("tap123i0")),
        (net(31, ",bridge=vmbr0,firewall=1,tag=100,trunks=2;3"), Some("tap123i31")),
        (net(1, ",bridge=vnet0,link_down=1,queues=4,rate=1.5,mtu=1"), Some("tap123i1")),
        ("net2: model=e1000,macaddr=BC:24:11:00:00:02,bridge=vmbr0\n".into(), Some("tap123i2")),
        // Without a bridge QEMU is the network.
        (net(0, ""), None),
    ];
    for (text, tap) in cases {
        let found = as_json(&record(&text));
        assert_eq!(found["network"]["nics"][0]["port"]["ifname"].as_str(), tap, "{text}");
    }
    for text in [
        "net0: virtio,bridge=vmbr0\n",
        "net0: virtio=BD:24:11:00:00:01,bridge=vmbr0\n",
        "net0: virtio=BC:24:11:00:00:01,bridge\n",
        "net0: virtio=BC:24:11:00:00:01,e1000=BC:24:11:00:00:02\n",
    ] {
        // Without another NIC the VM would only lack a place, without a word of the reason.
        let problem = made(text, &given()).expect_err(text).to_string();
        assert!(problem.starts_with("`net0`: expected"), "{problem}");
        let with_another = made(&format!("{text}{}", net(1, ",bridge=vmbr0")), &given()).expect(text);
        assert_eq!(
            (with_another.record.network.nics.len(), with_another.problems[0].to_string()),
            (1, problem)
        );
    }
    for text in ["net32: virtio=BC:24:11:00:00:01\n", "net00: virtio=BC:24:11:00:00:01\n"] {
        assert!(record(text).network.nics.is_empty(), "{text}");
    }
}

#[test]
fn a_vm_without_configured_addresses_keeps_its_own_defaults() {
    let net = "net0: virtio=BC:24:11:00:00:01,bridge=vmbr0\n";
    assert_eq!(as_json(&record(net))["network"]["mode"], "none");
    assert_eq!(as_json(&record(&format!("{net}ipconfig0: ip=dhcp\n")))["network"]["mode"], "raw");
}

#[test]
fn a_clone_is_another_instance() {
    let clone =
        GUIDE.replace("ubuntu2", "ubuntu3").replace("b3247ab1", "c4358bc2").replace("2C:69:EC", "2C:69:ED");
    let clone = clone.replace("ctime=1725975013", "ctime=1725975099");
    let (one, two) = (record(GUIDE), record(&clone));
    assert_ne!(one.instance_id(), two.instance_id());
    assert_ne!(one.ec2_id(), two.ec2_id());
    let moved = record(&GUIDE.replace("memory: 2048", "memory: 4096"));
    assert_eq!(one.instance_id(), moved.instance_id(), "hardware is no part of the drive");
}

#[test]
fn two_configurations_with_one_uuid_are_two_vms() {
    let other = GUIDE.replace("ctime=1725975013", "ctime=1725975099");
    let of = |vmid: u32, text: &str| {
        let given = TranslationInput { cluster: "pve".into(), ..given() };
        translate(vmid, &parsed(text), &given, &ProxmoxOptions::default(), &RecordLimits::DEFAULT)
            .expect("a record")
            .record
    };
    let (one, two) = (of(123, GUIDE), of(124, GUIDE));
    assert_eq!(one.vm.uuid, two.vm.uuid, "the guests see what their firmware says");
    assert_eq!(one.owner_text(), "proxmox/pve/123/1725975013");
    assert_eq!(two.owner_text(), "proxmox/pve/124/1725975013");
    assert_eq!(of(123, &other).owner_text(), "proxmox/pve/123/1725975099", "a later VM of the VMID");
    let ids =
        |r: &Record| [r.ec2_id(), r.reservation_id(), r.numeric_id().to_string(), r.ocid(), r.unique_uuid()];
    for (of_one, of_two) in ids(&one).iter().zip(&ids(&two)) {
        assert_ne!(of_one, of_two);
    }
    // The UUID may change, and the VM stays the same.
    assert_eq!(ids(&of(123, &GUIDE.replace("b3247ab1", "c4358bc2"))), ids(&one));
}

#[test]
fn no_part_of_a_record_names_its_owner() {
    let forged = json!({"vm": {"owner": "proxmox/pve/100/1"}});
    let block = "description: %0A```imds%0Avm%3A {owner%3A x}%0A```\n";
    let error = made(&format!("{GUIDE}{block}"), &given()).expect_err("the block has no `vm`").to_string();
    assert!(error.contains("`vm`"), "{error}");
    for given in [
        TranslationInput { defaults: Some(forged.clone()), ..given() },
        TranslationInput { own: Some(forged), ..given() },
        TranslationInput {
            custom: Custom { meta: Some("owner: x\nvm: {owner: x}\n".into()), ..Custom::default() },
            ..given()
        },
    ] {
        let owner = made(GUIDE, &given).expect("a record").record.owner();
        assert_eq!(owner.as_str(), "proxmox/-/123/1725975013", "{given:?}");
    }
    // Without a time of creation, as before Proxmox VE 7.1, or with another text.
    for meta in ["", "meta: creation-qemu=6.1\n", "meta: ctime=1/2\n"] {
        let text = GUIDE.replace("meta: creation-qemu=9.0.2,ctime=1725975013\n", meta);
        assert_eq!(record(&text).owner_text(), "proxmox/-/123/-", "{meta}");
    }
}

#[test]
fn a_subject_of_values_that_tenants_choose_needs_the_owner() {
    for (template, refused) in [
        ("vm/{uuid}", Some("{uuid}")),
        ("vm/{name}", Some("{name}")),
        ("{project}/{name}", Some("{name}")),
        ("{owner}/{name}", None),
        ("vm/{project}", None),
    ] {
        let part = Some(json!({"identity": {"subject": template}}));
        let made = made(GUIDE, &TranslationInput { defaults: part, ..given() });
        assert_eq!(made.is_err(), refused.is_some(), "{template}");
        if let (Some(value), Err(error)) = (refused, made) {
            assert!(error.to_string().contains(value), "{error}");
        }
    }
}

#[test]
fn a_vm_without_a_uuid_gets_one_of_its_own() {
    let without = GUIDE.replace("smbios1: uuid=b3247ab1-1fe6-428e-965b-08a1b64a8746\n", "");
    let uuid = record(&without).vm.uuid;
    assert_eq!(uuid, record(&without.replace("ubuntu2", "other")).vm.uuid);
    assert_ne!(uuid, record(&without.replace("ctime=1725975013", "ctime=1725975014")).vm.uuid);
    let other =
        translate(124, &parsed(&without), &given(), &ProxmoxOptions::default(), &RecordLimits::DEFAULT);
    assert_ne!(uuid, other.expect("a record").record.vm.uuid);
}

#[test]
fn the_firmware_says_which_cloud_the_guest_looks_for() {
    for (smbios1, expected) in [
        ("serial=ZHM9bm9jbG91ZDtzPWh0dHA6Ly8xNjkuMjU0LjE2OS4yNTQvdjEv,base64=1", "nocloud"),
        ("serial=ZHM9bm9jbG91ZC1uZXQ=,base64=1", "nocloud-net"),
        ("product=T3BlblN0YWNrIE5vdmE=,base64=1", "openstack"),
        ("manufacturer=QW1hem9uIEVDMg==,base64=1", "ec2"),
        ("manufacturer=QW1hem9uIEVDMg,base64=1", "ec2"),
        ("serial=%,base64=1", "nocloud"),
    ] {
        let text = format!("smbios1: uuid=b3247ab1-1fe6-428e-965b-08a1b64a8746,{smbios1}\n");
        assert_eq!(as_json(&record(&text))["serve"]["smbios"], expected, "{smbios1}");
    }
}

#[test]
fn only_cloudbase_init_gets_the_password_itself() {
    let with = |more: &str| as_json(&record(&format!("ciuser: admin\ncipassword: hunter2\n{more}")));
    assert_eq!(with("ostype: win11\n")["admin"], json!({"user": "admin", "password": "hunter2"}));
    assert_eq!(with("ostype: l26\n")["admin"], json!({"user": "admin", "password": null}));
}

/// `qm set` accepts these values. The user-data has them unchanged; a record's fields cannot have them.
#[test]
fn a_value_that_no_field_can_have_is_left_out_and_told() {
    let long = "a".repeat(256);
    for (setting, value, more) in [
        ("ciuser", "\"\"", ""),
        ("ciuser", long.as_str(), ""),
        ("cipassword", "\"\"", "ostype: win11\n"),
        ("arch", "\"\"", ""),
    ] {
        let made = made(&format!("{setting}: {value}\n{more}"), &given()).expect("a record");
        let told: Vec<_> = made.problems.iter().map(ToString::to_string).collect();
        assert!(told.len() == 1 && told[0].starts_with(&format!("`{setting}`")), "{setting}: {told:?}");
    }
}

#[test]
fn tags_are_labels() {
    assert_eq!(as_json(&record("tags: shop;web front,x\n"))["labels"], json!(["shop", "web", "front", "x"]));
}

#[test]
fn custom_files_replace_the_drives_documents() {
    let custom = Custom {
        user: Some("#cloud-config\nruncmd: [ls]\n".into()),
        network: Some("version: 2\nethernets: {}\n".into()),
        meta: Some("instance-id: i-own\nlocal-hostname: own.example\nrole: web\nlist: [1]\n".into()),
        vendor: Some("#cloud-config\n".into()),
    };
    let made = made(GUIDE, &TranslationInput { custom, ..given() }).expect("a record");
    let found = as_json(&made.record);
    assert_eq!(made.record.instance_id(), "i-own");
    assert_eq!(made.record.hostname.fqdn(), "own.example");
    assert_eq!(found["network"]["raw"], "version: 2\nethernets: {}\n");
    assert_eq!(found["metadata"], json!({"role": "web"}));
    let payload = |payload: &Option<metadata_content::record::vm::Payload>| payload.as_ref()?.bytes();
    assert_eq!(payload(&made.record.user_data).as_deref(), Some(&b"#cloud-config\nruncmd: [ls]\n"[..]));
    assert_eq!(payload(&made.record.vendor_data).as_deref(), Some(&b"#cloud-config\n"[..]));
}

#[test]
fn custom_networks_for_the_drive_alone_leave_the_rest_in_force() {
    let custom = Custom { network: Some("auto eth0\niface eth0 inet dhcp\n".into()), ..Custom::default() };
    let made = made(GUIDE, &TranslationInput { custom, ..given() }).expect("a record");
    assert_eq!(as_json(&made.record)["network"]["mode"], "auto");
    assert!(made.problems[0].to_string().starts_with("`cicustom`, network: expected"), "{:?}", made.problems);
}

#[test]
fn snippets_are_found_by_the_storages_of_the_cluster() {
    let storages = "dir: local\n\tpath /srv/local\n\tcontent iso,snippets\n\nnfs: team\n\texport /e\n\tserver s\n\n\
                    dir: odd\n\tcontent-dirs snippets=/snip,iso=/i\n\tpath /srv/odd\n\nlvmthin: thin\n\tvgname pve\n";
    let find = |value: &str, storages: &str| {
        let paths = snippets(&parsed(&format!("cicustom: {value}\n")), storages);
        paths.map(|paths| paths[0].clone().map(|path| path.display().to_string()).unwrap_or_default())
    };
    for (value, storages, expected) in [
        ("user=local:snippets/u.yaml", storages, "/srv/local/snippets/u.yaml"),
        ("user=local:snippets/u.yaml", "", "/var/lib/vz/snippets/u.yaml"),
        ("user=team:snippets/u.yaml,meta=local:snippets/m", storages, "/mnt/pve/team/snippets/u.yaml"),
        ("user=odd:snippets/u.yaml", storages, "/srv/odd/snip/u.yaml"),
        ("meta=local:snippets/m", storages, ""),
    ] {
        assert_eq!(find(value, storages).expect(value), expected, "{value}");
    }
    for value in [
        "user=thin:snippets/u",
        "user=none:snippets/u",
        "user=local:iso/u",
        "user=local:snippets/../u",
        "user=local:snippets/..",
        "user=/etc/shadow",
    ] {
        find(value, storages).expect_err(value);
    }
    // qemu-server ignores the setting.
    for value in ["other=local:snippets/u", "local:snippets/u", "user=local:snippets/u,user=local:snippets/u"]
    {
        let (config, dropped) =
            super::VmConfig::parse(format!("cicustom: {value}\n").as_bytes()).expect("read");
        assert_eq!((config.get("cicustom"), dropped.len()), (None, 1), "{value}");
    }
}

#[test]
fn parts_override_each_other_in_their_order() {
    let given = TranslationInput {
        defaults: Some(
            json!({"metadata": {"a": "defaults", "d": "defaults"}, "placement": {"region": "eu"}}),
        ),
        own: Some(json!({"metadata": {"c": "own"}, "vm": {"instance_id": "i-1", "uuid": "ignored"}})),
        ..given()
    };
    let text = format!(
        "#The shop's front end%3A 100%25\n#```imds\n#metadata: {{a: block, b: block, c: block}}\n#labels: [shop]\n#```\n{GUIDE}"
    );
    let record = made(&text.replace("metadata: {", "metadata%3A {"), &given).expect("a record").record;
    let found = as_json(&record);
    assert_eq!(found["metadata"], json!({"a": "block", "b": "block", "c": "own", "d": "defaults"}));
    assert_eq!((&found["placement"]["region"], &found["labels"]), (&json!("eu"), &json!(["shop"])));
    assert_eq!(record.instance_id(), "i-1");
    assert_eq!(record.vm.uuid.as_str(), "b3247ab1-1fe6-428e-965b-08a1b64a8746");
}

#[test]
fn a_description_may_not_say_what_belongs_to_the_node() {
    for (block, expected) in [
        ("network: {nics: []}", "found `network`"),
        ("vm: {uuid: x}", "found `vm`"),
        ("user_data: {source: {file: /etc/shadow}}", "found `user_data`"),
        ("serve: {limits: {rps: 1000000}}", "found `serve`"),
        ("- a", "a mapping in YAML"),
        ("a: [", "a mapping in YAML"),
    ] {
        let error = made(&format!("#```imds\n#{block}\n#```\n"), &given()).expect_err(block).to_string();
        assert!(error.contains(expected), "{error}");
    }
    let open = made("#```imds\n#labels: []\n", &given()).expect_err("no end").to_string();
    assert!(open.contains("a line ```"), "{open}");
}

#[test]
fn problems_name_the_setting_and_never_a_secret() {
    let text = b"cipassword: hunter2\xff\nsshkeys: hunter2 hunter2\nname: a_b\nsmbios1: hunter2\ntags: ok\nargs: \xff\n";
    let (config, dropped) = super::VmConfig::parse(text).expect("a configuration");
    let made = translate(123, &config, &given(), &ProxmoxOptions::default(), &RecordLimits::DEFAULT)
        .expect("a record");
    let told: Vec<_> = dropped.iter().chain(&made.problems).map(ToString::to_string).collect();
    assert_eq!(told.len(), 4, "{told:?}");
    for (problem, setting) in told.iter().zip(["`cipassword`", "`sshkeys`", "`name`", "`smbios1`"]) {
        assert!(problem.starts_with(setting), "{problem}");
    }
    assert!(!format!("{config:?} {}", told.join("\n")).contains("cipassword: hunter2"));
}

/// Any text makes a record or an error, in bounded time.
#[test]
fn hostile_text_never_panics() {
    let words: [&[u8]; 24] = [
        b"net0: ",
        b"virtio=BC:24:11:00:00:01",
        b",bridge=vmbr0",
        b"ipconfig0: ",
        b"ip=192.0.2.5/24",
        b",gw=",
        b"ip6=auto",
        b"\n",
        b"\n",
        b"#```imds\n",
        b"#```\n",
        b"#",
        b"[PENDING]",
        b"[",
        b"]",
        b"%",
        b"%ff",
        b"\xff",
        b"smbios1: uuid=",
        b"serial=,base64=1",
        b"sshkeys: ",
        b"name: ",
        b"cicustom: user=local:snippets/a",
        b"=,",
    ];
    let mut random = fastrand::Rng::with_seed(123);
    for _ in 0..3_000 {
        let count = random.usize(..20);
        let mut text: Vec<u8> =
            (0..count).flat_map(|_| words[random.usize(..words.len())].to_vec()).collect();
        if random.bool() && !text.is_empty() {
            let at = random.usize(..text.len());
            text[at] = random.u8(..);
        }
        let Ok((config, _)) = super::VmConfig::parse(&text) else { continue };
        drop(snippets(&config, &String::from_utf8_lossy(&text)));
        let custom = Custom { meta: Some(text.clone().into()), ..Custom::default() };
        drop(translate(
            123,
            &config,
            &TranslationInput { custom, ..given() },
            &ProxmoxOptions::default(),
            &RecordLimits::DEFAULT,
        ));
        drop(translate(123, &config, &given(), &ProxmoxOptions::default(), &RecordLimits::DEFAULT));
    }
    super::VmConfig::parse(&vec![b'a'; super::super::config::FILE_BYTES + 1]).expect_err("too much");
    let many: String = (0..=super::super::config::SETTINGS).map(|n| format!("a{n}: 1\n")).collect();
    super::VmConfig::parse(many.as_bytes()).expect_err("too many");
}

#[test]
fn the_error_of_an_invalid_record_names_the_part_that_makes_it_so() {
    let wrong = || Some(json!({"no_such_field": 1}));
    for (given, part) in [
        (
            TranslationInput { defaults: wrong(), ..given() },
            "/etc/xdp-imds/proxmox/defaults.yaml: no_such_field",
        ),
        (TranslationInput { own: wrong(), ..given() }, "/etc/xdp-imds/proxmox/123.yaml: no_such_field"),
        (
            TranslationInput { own: Some(json!({"identity": {"subject": "x/{name}"}})), ..given() },
            "/etc/xdp-imds/proxmox/123.yaml: identity.subject: expected `{owner}` beside `{name}`",
        ),
        (
            TranslationInput { defaults: Some(json!({"identity": {"subject": "x/{name}"}})), ..given() },
            "/etc/xdp-imds/proxmox/defaults.yaml: identity.subject: expected `{owner}` beside `{name}`",
        ),
        // Either part alone would do, so that none is named.
        (TranslationInput { own: wrong(), defaults: wrong(), ..given() }, "the record: no_such_field"),
    ] {
        let error = made(GUIDE, &given).expect_err(part).to_string();
        assert!(error.starts_with(part), "{error}");
    }
    let twice = format!("{GUIDE}net1: virtio=BC:24:11:2C:69:EC,bridge=vmbr1\n");
    let error = made(&twice, &given()).expect_err("one MAC twice").to_string();
    assert!(
        error.starts_with("the record, NIC net1: network.nics[1].mac: expected each MAC once"),
        "{error}"
    );
    let block = format!("#```imds\n#hostname: {{}}\n#```\n{GUIDE}");
    let error = made(&block, &given()).expect_err("no field of the block").to_string();
    assert!(error.contains("others belong in /etc/xdp-imds/proxmox/123.yaml, found `hostname`"), "{error}");
}

#[test]
fn a_migration_is_an_event_while_its_lock_is_there() {
    let events = |lock: &str, given: &TranslationInput| {
        let record = made(&format!("{lock}{GUIDE}"), given).expect("a record").record;
        let shown =
            |event: &ScheduledEvent| format!("{} {} {}", event.id, event.kind.name(), event.state.name());
        record.events.iter().map(shown).collect::<Vec<_>>()
    };
    assert_eq!(events("lock: migrate\n", &given()), ["migration freeze started"]);
    for lock in ["", "lock: backup\n", "lock: snapshot\n"] {
        assert!(events(lock, &given()).is_empty(), "{lock}");
    }
    // A file of the node has events of its own, as many as there may be.
    let own = |events: Vec<Value>| TranslationInput { own: Some(json!({"events": events})), ..given() };
    let reboot = |id: String| json!({"id": id, "kind": "reboot"});
    let one = own(vec![reboot("kernel".into())]);
    assert_eq!(events("lock: migrate\n", &one), ["kernel reboot scheduled", "migration freeze started"]);
    let same = own(vec![reboot("migration".into())]);
    assert_eq!(events("lock: migrate\n", &same), ["migration reboot scheduled"]);
    let full = own((0..EVENTS_PER_VM).map(|n| reboot(format!("e{n}"))).collect());
    assert_eq!(events("lock: migrate\n", &full).len(), EVENTS_PER_VM);
}
