//! The parsers and translators of what others write, one row each.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use metadata_content::http::Method;
use metadata_content::mailbox::Mailbox;
use metadata_content::record::identity::Audience;
use metadata_content::record::{Credential, Record, RecordLimits, is_network_config, is_network_data};
use metadata_content::sink::Outbox;
use metadata_content::store::{Interner, VmState};
use metadata_content::token::Keyring;
use metadata_content::{dialect, parser};
use metadata_feed::kubevirt::translate::{VolumeFiles, translate as translate_vmi};
use metadata_feed::kubevirt::{self, Vmi};
use metadata_feed::libvirt::NAMESPACE;
use metadata_feed::libvirt::domain::{self, LibvirtDomain, TapNames};
use metadata_feed::pods::{Pod, Tap, TapKind};
use metadata_feed::proxmox::drive::Custom;
use metadata_feed::proxmox::{self, TranslationInput, VmConfig};
use metadata_feed::record_part::merge;
use metadata_signer::jwt::JoinedKeySet;
use metadata_user::config::Config;
use metadata_user::verbs::webhook;
use serde_json::{Value, json};
use support::question::Question;

/// A parser with a place for what others write.
pub(crate) struct Target {
    pub(crate) name: &'static str,
    /// What it allocates in all for each byte of the input, at most.
    pub(crate) times: usize,
    /// What it allocates besides, at most.
    pub(crate) bytes: usize,
    /// Reads a text.
    pub(crate) run: fn(&str),
}

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
/// What aliases allocate, as far as the parser's budget lets them: it keeps the nodes of anchors for replay, in lists
/// that grow.
const REPLAYS: usize = 8 * MIB;
const UUID: &str = "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d";

/// Every parser and translator. A new one is a row.
pub(crate) const TARGETS: [Target; 27] = [
    Target { name: "YAML", times: 256, bytes: REPLAYS, run: |text| _ = parser::yaml::<Value>(text) },
    Target { name: "JSON", times: 256, bytes: 64 * KIB, run: |text| _ = parser::json::<Value>(text) },
    Target { name: "record in YAML", times: 256, bytes: REPLAYS, run: |text| served("r.yaml", text) },
    Target { name: "record in JSON", times: 256, bytes: 64 * KIB, run: |text| served("r.json", text) },
    Target {
        name: "network.raw",
        times: 1024,
        bytes: 2 * REPLAYS,
        run: |text| served("r.json", &raw("raw", text)),
    },
    Target {
        name: "network.network_data",
        times: 1024,
        bytes: REPLAYS,
        run: |text| served("r.json", &raw("network_data", text)),
    },
    Target {
        name: "network-config",
        times: 256,
        bytes: REPLAYS,
        run: |text| _ = is_network_config(&text.into()),
    },
    Target {
        name: "network_data.json",
        times: 256,
        bytes: 64 * KIB,
        run: |text| _ = is_network_data(&text.into()),
    },
    Target { name: "metadata of a record", times: 1024, bytes: REPLAYS, run: metadata },
    Target { name: "identity.subject", times: 1024, bytes: REPLAYS, run: subject },
    Target { name: "credentials", times: 256, bytes: 256 * KIB, run: credentials },
    Target { name: "merge of parts", times: 1024, bytes: REPLAYS, run: merged },
    Target {
        name: "Proxmox configuration",
        times: 512,
        bytes: REPLAYS,
        run: |text| configured(text, TranslationInput::default()),
    },
    Target { name: "Proxmox description", times: 512, bytes: REPLAYS, run: described },
    Target {
        name: "cicustom meta",
        times: 512,
        bytes: REPLAYS,
        run: |text| custom(Custom { meta: Some(text.to_owned().into()), ..Custom::default() }),
    },
    Target {
        name: "cicustom network",
        times: 512,
        bytes: REPLAYS,
        run: |text| custom(Custom { network: Some(text.to_owned().into()), ..Custom::default() }),
    },
    Target {
        name: "cicustom user",
        times: 512,
        bytes: REPLAYS,
        run: |text| custom(Custom { user: Some(text.to_owned().into()), ..Custom::default() }),
    },
    Target { name: "libvirt domain", times: 512, bytes: 256 * KIB, run: domain },
    Target { name: "libvirt metadata", times: 1024, bytes: REPLAYS, run: instance },
    Target {
        name: "libvirt <record>",
        times: 1024,
        bytes: REPLAYS,
        run: |text| instance(&format!("<record><![CDATA[{text}]]></record>")),
    },
    Target { name: "VirtualMachineInstance", times: 512, bytes: 256 * KIB, run: instance_of },
    Target {
        name: "networkData of a VMI",
        times: 1024,
        bytes: REPLAYS,
        run: |text| vmi("networkData", text, ""),
    },
    Target { name: "userData of a VMI", times: 1024, bytes: REPLAYS, run: |text| vmi("userData", text, "") },
    Target { name: "files of Secrets", times: 1024, bytes: REPLAYS, run: |text| vmi("userData", "#", text) },
    Target { name: "AdmissionReview", times: 512, bytes: 256 * KIB, run: review },
    Target { name: "request bodies of guests", times: 256, bytes: REPLAYS, run: posted },
    Target { name: "configuration and key sets", times: 512, bytes: REPLAYS, run: administered },
];

/// The record that the targets fill.
fn record(network: Value) -> Value {
    json!({
        "schema": "vmrecord/1", "generation": 1,
        "vm": {"uuid": UUID, "name": "a", "project": {"id": "p1", "number": 1, "account": "000000000000"}},
        "hostname": {"short": "web-1", "domain": "example.internal"},
        "placement": {"region": "local", "zone": "local-a", "fault_domain": "0"},
        "network": network,
    })
}

/// A record with a text as a network document, and with its value if it is JSON.
fn raw(field: &str, text: &str) -> String {
    let mut network = json!({"mode": "raw"});
    network[field] = text.into();
    record(network).to_string()
}

/// Parses a record and renders every dialect.
fn served(name: &str, text: &str) {
    let Ok((record, _)) = Record::parse(name, text) else { return };
    _ = dialect::render(&record, &mut Interner::new(), VmState::alone(UUID));
}

fn metadata(text: &str) {
    let mut record = record(json!({}));
    let keys = text.split('\n').enumerate();
    record["metadata"] =
        keys.map(|(n, line)| (format!("k{n}"), line.into())).collect::<serde_json::Map<_, _>>().into();
    served("r.json", &record.to_string());
    record["metadata"] = json!({"a": text, text: "a"});
    record["labels"] = text.split(' ').collect();
    served("r.json", &record.to_string());
}

fn subject(text: &str) {
    _ = Audience::parse(text);
    let mut record = record(json!({}));
    record["identity"] = json!({"subject": text});
    if let Ok((record, _)) = Record::parse("r.json", &record.to_string()) {
        _ = record
            .identity
            .as_ref()
            .and_then(|identity| identity.subject.as_ref())
            .map(|subject| subject.fill(&record));
    }
}

fn credentials(text: &str) {
    let mut record = record(json!({}));
    let source = json!({"file": "secret"});
    record["credentials"] = json!({
        "iam": {"role": "app", "source": source},
        "service_account": {"name": "web", "token": {"source": source}},
        "managed_identity": {"client_id": "c", "source": source},
    });
    let mut record = Record::parse("r.json", &record.to_string()).expect("a record").0;
    for credential in Credential::ALL {
        _ = record.credentials.resolve(credential, text.as_bytes());
    }
}

/// Merges a part of a record into another and back, as the feeds do.
fn merged(text: &str) {
    let Ok(part) = parser::yaml::<Value>(text) else { return };
    let mut whole = record(json!({"nics": [{"mac": "52:54:00:00:00:01"}]}));
    merge(&mut whole, part.clone());
    merge(&mut whole, part);
    served("r.json", &whole.to_string());
}

fn configured(text: &str, given: TranslationInput) {
    let Ok((config, _)) = VmConfig::parse(text.as_bytes()) else { return };
    _ = proxmox::translate(100, &config, &given, &proxmox::ProxmoxOptions::default(), &RecordLimits::DEFAULT);
}

/// Writes a text as lines of a description.
fn described(text: &str) {
    let lines = text.split('\n').map(|line| format!("#{line}\n"));
    let block: String =
        ["#```imds\n".to_owned()].into_iter().chain(lines).chain(["#```\n".to_owned()]).collect();
    configured(&(block + "name: a\n"), TranslationInput::default());
}

fn custom(custom: Custom) {
    configured(
        "name: a\nnet0: virtio=BC:24:11:2C:69:EC,bridge=vmbr0\nipconfig0: ip=dhcp\n",
        TranslationInput { custom, ..TranslationInput::default() },
    );
}

fn domain(text: &str) {
    _ = LibvirtDomain::parse(text.as_bytes(), TapNames::Made);
    composed(&format!("<domain><name>a</name><uuid>{UUID}</uuid><devices>{text}</devices></domain>"));
}

fn instance(text: &str) {
    composed(&format!(
        "<domain><name>a</name><uuid>{UUID}</uuid><metadata>\
         <imds:instance xmlns:imds=\"{NAMESPACE}\">{text}</imds:instance></metadata></domain>"
    ));
}

fn composed(xml: &str) {
    let Ok(domain) = LibvirtDomain::parse(xml.as_bytes(), TapNames::Made) else { return };
    if let Ok(Some(record)) = domain::record(&domain, std::path::Path::new("/nonexistent"), true) {
        served("r.json", &record.to_string());
    }
}

fn instance_of(text: &str) {
    if let Ok(vmi) = Vmi::read(text.as_bytes()) {
        translated(&vmi, "");
    }
}

fn vmi(field: &str, text: &str, file: &str) {
    let annotations = json!({"imds.kubevirt.io/user-data": text, "a": text});
    let mut volume = json!({"name": "c", "cloudInitNoCloud": {}});
    volume["cloudInitNoCloud"][field] = text.into();
    let secret = json!({"secret": {"secretName": "s"}});
    let vmi = json!({
        "metadata": {"name": "a", "namespace": "b", "uid": UUID, "annotations": if file.is_empty() { json!({}) } else { annotations }},
        "spec": {
            "domain": {"devices": {"interfaces": [{"name": "default", "masquerade": {}}]}},
            "networks": [{"name": "default"}],
            "volumes": [volume],
            "accessCredentials": [{"sshPublicKey": {"source": secret, "propagationMethod": {"noCloud": {}}}}],
        },
        "status": {"phase": "Running", "activePods": {"p": "n1"}},
    });
    translated(&Vmi::from_value(vmi).expect("a VMI"), file);
}

fn translated(vmi: &Vmi, file: &str) {
    let pod = Pod {
        uid: "p".parse().expect("a uid"),
        pid: 42,
        vmi: vmi.metadata.uid.clone(),
        netns: "/proc/42/ns/net".into(),
        taps: vec![Tap {
            ifname: "tap0".into(),
            kind: TapKind::Tap,
            mac: metadata_common::mac::Mac::default(),
            queues: 1,
        }],
        nics: Vec::new(),
    };
    let read = |_: &str| {
        let names = ["userdata", "key", "..data"];
        let files: VolumeFiles = names.map(|name| (name.to_owned(), file.to_owned().into())).into();
        Ok((!file.is_empty()).then_some(files))
    };
    let options: kubevirt::KubevirtOptions = serde_json::from_value(json!({})).expect("options");
    _ = translate_vmi(vmi, &pod, &read, &options, &RecordLimits::DEFAULT);
}

fn review(text: &str) {
    _ = webhook::answer(text.as_bytes(), webhook::review::judge_vm);
    let object = parser::json(text).unwrap_or_else(|_| Value::from(text));
    let review = json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
        "uid": UUID, "operation": "CREATE", "namespace": "n", "name": "vm-a",
        "object": {"spec": {"template": {"metadata": {"annotations": object}, "spec": {"domain": {}}}}}, "oldObject": null}});
    _ = webhook::answer(review.to_string().as_bytes(), webhook::review::judge_vm);
}

/// Posts a body to each path that takes one, and makes the messages of what is forwarded.
fn posted(text: &str) {
    let mut record = record(json!({}));
    let sink = "/nowhere/sink";
    record["sinks"] = json!({"ready": sink, "phone_home": sink, "events": sink, "password": sink});
    let record = Record::parse("r.json", &record.to_string()).expect("a record").0;
    let outbox = Outbox::new(|message| {
        _ = message.json();
        true
    });
    let vm = VmState::of(&record, Arc::new(Keyring::ephemeral()), Arc::new(Mailbox::new(UUID, &outbox)));
    let responses = dialect::render(&record, &mut Interner::new(), vm);
    for path in [
        "/v1/phone-home",
        "/v1/events",
        "/openstack/2013-04-04/password",
        "/MAAS/metadata/status/",
        "/machine/?comp=health",
        "/metadata/scheduledevents",
    ] {
        _ = Question::get(path).by(Method::Post).with("Metadata", "true").saying(text).ask(&responses);
    }
}

/// What administrators write: the agent's configuration, and sets of keys that another server publishes.
fn administered(text: &str) {
    let mut file = tempfile::NamedTempFile::new().expect("a file");
    file.write_all(text.as_bytes()).expect("it is written");
    _ = Config::read(file.path());
    let set =
        parser::json(text).unwrap_or_else(|_| json!({"keys": [{"kid": text, "n": STANDARD.encode(text)}]}));
    _ = JoinedKeySet::default().add(&set);
    _ = BTreeMap::from([("a", set)]);
}
