//! Tables of cases: every combination of binding, data source and migration state, and whole VMIs with their records.

use metadata_common::mac::Mac;
use metadata_content::record::{Record, RecordLimits};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;

use super::{
    KEY_BYTES, KEYS_PER_SECRET, PublicKeyError, PublicKeys, TranslationOutcome, VmiProblem, VmiTranslation,
    VolumeFiles, is_wanted, names, translate,
};
use crate::kubevirt::{KubevirtOptions, Vmi};
use crate::pods::{Pod, PodNic, Tap, TapKind};

/// The address of all taps: 0e:00:00:00:00:01.
const TAP_MAC: [u8; 6] = [0x0e, 0, 0, 0, 0, 1];

/// A line of a table: its additions to a VMI, the pod and the volumes, and the expected result.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    name: String,
    /// Merged into the VMI (RFC 7386).
    #[serde(default)]
    vmi: Value,
    #[serde(default)]
    pod: Option<PodForm>,
    #[serde(default)]
    files: BTreeMap<String, BTreeMap<String, String>>,
    /// Merged into the options.
    #[serde(default)]
    options: Value,
    /// Merged into the expected record (RFC 7386); a `null` removes a field.
    #[serde(default)]
    record: Value,
    /// True if the identities are expected without a record.
    #[serde(default)]
    awaited: bool,
    /// True if no NIC is served.
    #[serde(default)]
    unserved: bool,
    /// A part of each problem's message, in order.
    #[serde(default)]
    problems: Vec<String>,
}

/// A pod in few words.
#[derive(Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct PodForm {
    uid: Option<String>,
    pid: Option<u32>,
    taps: Option<Vec<String>>,
    macvtaps: Vec<String>,
    nics: BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tables {
    base: Line,
    bindings: Vec<Line>,
    sources: Vec<Line>,
    states: Vec<Line>,
}

fn tables() -> Tables {
    let text = include_str!("fixtures/tables.yaml");
    serde_yaml::from_str(text).expect("the tables are YAML")
}

/// RFC 7386.
fn merge(into: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        if !patch.is_null() {
            *into = patch.clone();
        }
        return;
    };
    if !into.is_object() {
        *into = json!({});
    }
    for (key, value) in patch {
        match value {
            Value::Null => _ = into.as_object_mut().expect("an object").remove(key),
            value => merge(&mut into[key], value),
        }
    }
}

/// A case, which applies several lines in turn.
fn joined(lines: &[&Line]) -> Line {
    let mut case = lines[0].clone();
    for line in &lines[1..] {
        case.name = format!("{} / {}", case.name, line.name);
        merge(&mut case.vmi, &line.vmi);
        merge(&mut case.options, &line.options);
        merge(&mut case.record, &line.record);
        case.files.extend(line.files.clone());
        case.awaited |= line.awaited;
        case.unserved |= line.unserved;
        case.problems.extend(line.problems.clone());
        let (pod, more) = (case.pod.get_or_insert_default(), line.pod.clone().unwrap_or_default());
        pod.uid = more.uid.or(pod.uid.take());
        pod.pid = more.pid.or(pod.pid);
        pod.taps = more.taps.or(pod.taps.take());
        pod.macvtaps.extend(more.macvtaps);
        pod.nics.extend(more.nics);
    }
    case
}

impl PodForm {
    fn pod(&self) -> Pod {
        let pid = self.pid.unwrap_or(42);
        let tap =
            |kind| move |name: &String| Tap { ifname: name.clone(), kind, mac: Mac(TAP_MAC), queues: 1 };
        let taps = self.taps.iter().flatten().map(tap(TapKind::Tap));
        let nic = |(name, mac): (&String, &String)| PodNic {
            name: name.clone(),
            kind: "veth".into(),
            mac: mac.parse().expect("a MAC"),
        };
        Pod {
            uid: self.uid.as_deref().unwrap_or("p").parse().expect("a uid"),
            pid,
            vmi: String::new(),
            netns: format!("/proc/{pid}/ns/net"),
            taps: taps.chain(self.macvtaps.iter().map(tap(TapKind::Macvtap))).collect(),
            nics: self.nics.iter().map(nic).collect(),
        }
    }
}

fn run(case: &Line) -> VmiTranslation {
    let vmi = Vmi::from_value(case.vmi.clone()).unwrap_or_else(|error| panic!("{}: {error}", case.name));
    let options: KubevirtOptions = match &case.options {
        Value::Null => KubevirtOptions::default(),
        options => serde_json::from_value(options.clone()).expect("options"),
    };
    let read = |volume: &str| {
        let files = case.files.get(volume);
        let files = files.map(|files| files.iter().map(|(k, v)| (k.clone(), v.clone().into())).collect());
        Ok(files) as Result<Option<VolumeFiles>, String>
    };
    let pod = case.pod.as_ref().expect("a pod").pod();
    assert!(is_wanted(&vmi, &options), "{}", case.name);
    translate(&vmi, &pod, &read, &options, &RecordLimits::DEFAULT)
}

/// The record as a table writes it: payloads as text, without null and empty fields.
fn shown(record: &Record) -> Value {
    let mut shown: Value = serde_json::from_str(&record.to_json().expect("JSON")).expect("JSON");
    for (name, payload) in record.payloads() {
        shown[name] = payload
            .and_then(|payload| payload.bytes())
            .map_or(Value::Null, |bytes| String::from_utf8_lossy(&bytes).into_owned().into());
    }
    shown["serve"] = Value::Null;
    strip(&mut shown);
    shown
}

fn strip(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.values_mut().for_each(strip);
            fields.retain(|_, value| !value.is_null() && *value != json!({}) && *value != json!([]));
        }
        Value::Array(items) => items.iter_mut().for_each(strip),
        _ => {}
    }
}

fn check(case: &Line) {
    let VmiTranslation { outcome, problems, .. } = run(case);
    let said: Vec<String> = problems.iter().map(ToString::to_string).collect();
    let matches = said.len() == case.problems.len()
        && said.iter().zip(&case.problems).all(|(said, words)| said.contains(words));
    assert!(matches, "{}: said {said:#?}, expected {:#?}", case.name, case.problems);
    let mut wanted = case.record.clone();
    strip(&mut wanted);
    match outcome {
        TranslationOutcome::Unserved => assert!(case.unserved, "{}: unserved", case.name),
        TranslationOutcome::Expect(identities) => {
            assert!(case.awaited && !case.unserved, "{}: waits for {problems:?}", case.name);
            let nics = wanted["network"]["nics"].as_array().expect("NICs");
            let named =
                |nic: &Value| [&nic["port"]["ifname"], &nic["port"]["netns"], &nic["mac"]].map(Value::clone);
            let found = identities.iter().map(|(port, mac)| {
                [port.ifname.clone(), port.netns.clone().unwrap_or_default(), mac.to_string()]
                    .map(Value::from)
            });
            assert!(found.eq(nics.iter().map(named)), "{}: {identities:?}", case.name);
        }
        TranslationOutcome::Record(record) => {
            assert!(!case.awaited && !case.unserved, "{}: a record", case.name);
            let found = shown(&record);
            assert_eq!(found, wanted, "{}: {found:#}", case.name);
            // The VMI of the kept file gives the same result.
            let kept = record.to_json().expect("JSON");
            Record::parse("kept.json", &kept).unwrap_or_else(|error| panic!("{}: {error}", case.name));
        }
    }
}

#[test]
fn every_binding_takes_every_source_in_every_state() {
    let Tables { base, bindings, sources, states } = tables();
    let mut cases = 0;
    for binding in &bindings {
        for source in &sources {
            for state in &states {
                let mut case = joined(&[&base, binding, source, state]);
                if binding.unserved {
                    // No guest can send requests, so no data is read.
                    case.problems.clone_from(&binding.problems);
                }
                check(&case);
                cases += 1;
            }
        }
    }
    assert!(cases >= 300, "{cases} cases");
}

/// OVN-Kubernetes' binding plugin for primary user-defined networks: the pod's first NIC belongs to the cluster, and
/// the status names the guest's NIC.
#[test]
fn l2bridge_on_a_primary_user_defined_network_is_served_on_its_managed_tap() {
    let case = "
        name: l2bridge
        vmi:
          spec:
            networks: [{name: default, pod: {}}]
            domain: {devices: {interfaces: [{name: default, binding: {name: l2bridge}}]}}
          status: {interfaces: [{name: default, podInterfaceName: ovn-udn1}]}
        pod:
          taps: [tap0]
          nics: {eth0: '0a:58:0a:80:00:05', ovn-udn1: '0a:58:0a:80:00:07', ovn-udn1-nic: '72:00:00:00:00:03'}
        record:
          network:
            nics:
            - id: default
              mac: 0a:58:0a:80:00:07
              addresses: [{method: dhcp4}]
              port: {ifname: tap0, netns: /proc/42/ns/net}
        ";
    check(&joined(&[&tables().base, &serde_yaml::from_str(case).expect("YAML")]));
}

#[test]
fn the_options_select_the_vms_to_serve() {
    let wanted = |annotation: &str, options: Value| {
        let mut vmi = json!({"metadata": {"name": "a", "namespace": "n"}});
        if !annotation.is_empty() {
            vmi["metadata"]["annotations"] = json!({"imds.kubevirt.io/enabled": annotation});
        }
        let options: KubevirtOptions = serde_json::from_value(options).expect("options");
        is_wanted(&Vmi::from_value(vmi).expect("a VMI"), &options)
    };
    let cases = [
        ("", json!({}), true),
        ("true", json!({}), true),
        ("false", json!({}), false),
        ("", json!({"opt_in": true}), false),
        ("true", json!({"opt_in": true}), true),
        ("yes", json!({"opt_in": true}), false),
        ("", json!({"namespaces": ["n"]}), true),
        ("true", json!({"namespaces": ["m"]}), false),
    ];
    for (annotation, options, served) in cases {
        assert_eq!(wanted(annotation, options.clone()), served, "{annotation} {options}");
    }
}

/// The translation of the base VMI with a change.
fn with(vmi: Value, files: &[(&str, &str, &str)], options: Value) -> VmiTranslation {
    let Tables { base, bindings, .. } = tables();
    let files = files.iter().map(|(volume, file, text)| {
        (volume.to_string(), BTreeMap::from([(file.to_string(), text.to_string())]))
    });
    let line = Line {
        vmi,
        files: files.collect(),
        options,
        name: "change".into(),
        record: Value::Null,
        pod: None,
        awaited: false,
        unserved: false,
        problems: Vec::new(),
    };
    run(&joined(&[&base, &bindings[0], &line]))
}

fn record(translation: VmiTranslation) -> Record {
    match translation.outcome {
        TranslationOutcome::Record(record) => *record,
        outcome => panic!("{outcome:?}: {:?}", translation.problems),
    }
}

#[test]
fn custom_keys_beyond_the_limits_are_omitted_and_reported() {
    let many: BTreeMap<String, String> = (0..17).map(|n| (format!("k{n:02}"), "v".repeat(256))).collect();
    let cases = [
        (json!({"instance-id": "i", "good": "v"}), vec!["instance-id"], 1),
        (json!({"a b": "v", "good": "v"}), vec!["a b"], 1),
        (json!({"long": "v".repeat(257)}), vec!["long"], 0),
        (json!(many), vec!["k16"], 16),
    ];
    for (given, left_out, kept) in cases {
        let volumes = json!([{"name": "ci", "cloudInitNoCloud": {"userData": "u", "metaData": given}}]);
        let translation = with(json!({"spec": {"volumes": volumes}}), &[], json!({}));
        let told: Vec<_> = translation
            .problems
            .iter()
            .map(|problem| match problem {
                VmiProblem::Metadata { key, .. } => key.as_str(),
                other => panic!("{other}"),
            })
            .collect();
        assert_eq!(told, left_out, "{given}");
        assert_eq!(record(translation).metadata.0.len(), kept, "{given}");
    }
}

#[test]
fn a_payload_larger_than_a_secret_can_be_is_withheld() {
    let volumes = json!([{"name": "ci", "cloudInitNoCloud": {"secretRef": {"name": "s"}}}]);
    for (bytes, served) in [(1 << 20, true), ((1 << 20) + 1, false)] {
        let text = "x".repeat(bytes);
        let vmi = json!({"spec": {"volumes": volumes}});
        let translation = with(vmi, &[("ci-udata", "userdata", &text)], json!({}));
        assert_eq!(matches!(translation.outcome, TranslationOutcome::Record(_)), served, "{bytes}");
        assert_eq!(translation.problems.is_empty(), served, "{bytes}");
    }
}

#[test]
fn host_names_are_kubevirts() {
    let long = "x".repeat(70);
    let cases = [
        (json!({"metadata": {"name": "web.example"}}), "web"),
        (json!({"metadata": {"name": "web"}, "spec": {"hostname": "other"}}), "other"),
        (json!({"metadata": {"name": long}}), &long[..63]),
    ];
    for (vmi, name) in cases {
        assert_eq!(record(with(vmi.clone(), &[], json!({}))).hostname.short.as_str(), name, "{vmi}");
    }
}

#[test]
fn without_a_firmware_uuid_the_vmis_uid_is_used() {
    let record = record(with(json!({"spec": {"domain": {"firmware": null}}}), &[], json!({})));
    assert_eq!(record.vm.uuid.as_str(), "b5e7c9d2-0c3f-4a52-8f2e-3d9a1c7b6e10");
}

#[test]
fn a_vmis_owner_is_what_the_api_server_assigned_and_nothing_that_it_says() {
    let reference = |changes: Value| {
        let mut reference = json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "web-1",
            "uid": "vm-uid", "controller": true, "blockOwnerDeletion": true});
        merge(&mut reference, &changes);
        json!({"metadata": {"ownerReferences": [reference]}})
    };
    let own = "kubevirt/shop/web-1/b5e7c9d2-0c3f-4a52-8f2e-3d9a1c7b6e10";
    for (vmi, owner) in [
        (json!({}), own),
        (json!({"metadata": {"ownerReferences": null}}), own),
        // A restarted VM has another VMI, and the same owner.
        (reference(json!({})), "kubevirt/shop/web-1/vm-uid"),
        (reference(json!({"controller": null})), own),
        (reference(json!({"kind": "VirtualMachineInstanceReplicaSet"})), own),
        (reference(json!({"apiVersion": "example.org/v1"})), own),
        (reference(json!({"name": "another"})), own),
        (reference(json!({"uid": ""})), own),
        // Whatever uid a tenant invents, the namespace is its own, and no text adds a part.
        (reference(json!({"uid": "../bank/vault/x"})), "kubevirt/shop/web-1/..%2Fbank%2Fvault%2Fx"),
        (json!({"spec": {"domain": {"firmware": {"uuid": "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d"}}}}), own),
        (json!({"metadata": {"annotations": {"imds.kubevirt.io/owner": "x", "vm.owner": "x"}}}), own),
    ] {
        let record = record(with(vmi.clone(), &[], json!({})));
        assert_eq!(record.owner_text(), owner, "{vmi}");
    }
}

#[test]
fn two_vms_of_one_uuid_share_no_derived_id() {
    let of = |namespace: &str| record(with(json!({"metadata": {"namespace": namespace}}), &[], json!({})));
    let (a, b) = (of("a"), of("b"));
    assert_eq!(a.vm.uuid, b.vm.uuid, "the guests see what their firmware says");
    assert_eq!(a.instance_id(), b.instance_id(), "and so does NoCloud's document");
    let ids = |record: &Record| {
        [
            record.owner_text().to_owned(),
            record.ec2_id(),
            record.reservation_id(),
            record.numeric_id().to_string(),
            record.ocid(),
            record.unique_uuid(),
            record.vm.project.account.to_string(),
            record.vm.project.number.to_string(),
        ]
    };
    for (of_a, of_b) in ids(&a).iter().zip(&ids(&b)) {
        assert_ne!(of_a, of_b);
    }
    assert!(metadata_content::record::values::is_uuid(&a.unique_uuid()), "{}", a.unique_uuid());
}

#[test]
fn no_two_vms_have_one_joined_instance_id() {
    let options = json!({"instance_id": "namespace-name"});
    let mut seen = std::collections::HashSet::new();
    for (namespace, name) in
        [("a-b", "c"), ("a", "b-c"), ("a", "b.c"), ("a-b", "c.d"), ("a", "b"), ("a-b-c", "d")]
    {
        let vmi = json!({"metadata": {"namespace": namespace, "name": name}});
        let id = record(with(vmi, &[], options.clone())).instance_id().to_owned();
        assert!(seen.insert(id.clone()), "{id} twice");
    }
    assert!(
        seen.contains("a-b-c") && seen.contains("a-b/c"),
        "kubevirt-imds' id where it is clear: {seen:?}"
    );
}

#[test]
fn no_problem_repeats_a_secret() {
    let secret = "hunter2";
    let volumes = json!([{"name": "ci", "cloudInitNoCloud": {
        "userDataBase64": "hunter2!", "networkData": "hunter2", "metaData": {"k": "hunter2".repeat(99)},
    }}]);
    let credentials = json!([{"sshPublicKey": {"source": {"secret": {"secretName": "s"}},
        "propagationMethod": {"noCloud": {}}}}]);
    let vmi = json!({"spec": {"volumes": volumes, "accessCredentials": credentials}});
    let files = [("imds-token", "token", secret), ("s-access-cred", "k", "hunter2\u{7}")];
    let translation = with(vmi, &files, json!({}));
    assert!(translation.problems.len() >= 3, "{:?}", translation.problems);
    for problem in &translation.problems {
        assert!(!format!("{problem} {problem:?}").contains(secret), "{problem:?}");
    }
}

fn parse(text: &str) -> PublicKeys {
    PublicKeys::parse(&VolumeFiles::from([("keys".to_owned(), text.to_owned().into())]))
}

#[test]
fn parsing_stops_at_the_first_key_beyond_a_limit() {
    let most = "k\n".repeat(KEYS_PER_SECRET);
    assert_eq!(parse(&most).keys.len(), KEYS_PER_SECRET);
    for (text, error) in [
        (format!("{most}one more"), PublicKeyError::TooMany),
        ("k\n".repeat(1 << 19), PublicKeyError::TooMany),
        (format!("short\n{}", "k".repeat(KEY_BYTES + 1)), PublicKeyError::TooLong),
    ] {
        let found = parse(&text);
        assert_eq!((found.error, found.keys.len(), found.keys.capacity()), (Some(error), 0, 0));
    }
}

#[test]
fn comments_and_empty_lines_are_no_keys() {
    assert_eq!(parse("# all\n\n  ssh-ed25519 A  \n\r\n").keys, ["ssh-ed25519 A"]);
    let files = VolumeFiles::from([
        ("..data".to_owned(), "no".into()),
        ("a".to_owned(), bytes::Bytes::from_static(&[0xff])),
        ("b".to_owned(), "key".into()),
    ]);
    let found = PublicKeys::parse(&files);
    assert_eq!((found.keys, found.other_files), (vec!["key".to_owned()], vec!["a".to_owned()]));
}

#[test]
fn a_nic_is_found_under_every_name_kubevirt_gives() {
    let vmi = Vmi::from_value(json!({
        "spec": {"networks": [
            {"name": "red", "multus": {"networkName": "r"}},
            {"name": "pod", "pod": {}},
            {"name": "blue", "multus": {"networkName": "b"}},
            {"name": "green", "multus": {"networkName": "g"}},
        ]},
        "status": {"interfaces": [
            {"name": "green", "podInterfaceName": "net3"},
            {"podInterfaceName": "docker0"},
        ]},
    }))
    .expect("a VMI");
    // printf red | sha256sum
    let cases: [(&str, &[&str], &[&str]); 4] = [
        ("pod", &["tap0"], &["eth0"]),
        ("red", &["tapb1f51a511f1", "tap1"], &["podb1f51a511f1", "net1"]),
        ("blue", &["tap16477688c0e", "tap2"], &["pod16477688c0e", "net2"]),
        ("green", &["tap3", "tapba4788b226a"], &["net3", "podba4788b226a"]),
    ];
    for (network, taps, pod_nics) in cases {
        let names = names(&vmi, network);
        assert_eq!(names.taps, taps, "{network}");
        assert_eq!(names.pod_nics, pod_nics, "{network}");
    }
}

#[test]
fn the_primary_networks_tap_has_a_fixed_name() {
    let vmi = Vmi::from_value(json!({
        "spec": {"networks": [{"name": "udn", "multus": {"networkName": "u", "default": true}}]},
        "status": {"interfaces": [{"name": "udn", "podInterfaceName": "ovn-udn1"}]},
    }))
    .expect("a VMI");
    let names = names(&vmi, "udn");
    assert_eq!(names.taps, ["tap0"]);
    assert_eq!(names.pod_nics, ["ovn-udn1", "eth0"]);
}
