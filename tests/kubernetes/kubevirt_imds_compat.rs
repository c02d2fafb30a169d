//! Guests and VMs of kubevirt-imds (<https://github.com/rophy/kubevirt-imds>) find the same service here: the feed
//! translates its annotations, and its paths and formats give the same answers. Where an answer differs, the table
//! states the reason and, if there is one, the option that makes it equal.

use metadata_content::dialect::render;
use metadata_content::http::{Method, Response};
use metadata_content::record::{Record, RecordLimits};
use metadata_content::store::{Interner, Responses, VmState};
use metadata_feed::kubevirt::translate::{TranslationOutcome, VolumeFiles, is_wanted, translate};
use metadata_feed::kubevirt::{KubevirtOptions, Vmi};
use metadata_feed::pods::{Pod, Tap, TapKind};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;
use support::agent::{Agent, PortArgument};
use support::guest::{Guest, METADATA, Spec};
use support::host::Host;
use support::pattern::{Answered, responses};
use support::privileged;
use support::question::Question;
use support::record::{Identity, replace};
use support::schema::Schemas;

const MAC: &str = "52:54:00:69:00:00";
const USER_DATA: &str = "#cloud-config\nusers:\n- name: admin\n";
/// Expires at the end of 2029. Header and signature do not matter.
const TOKEN: &str = "e30.eyJleHAiOjE4OTM0NTYwMDB9.c2ln";
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    ask: String,
    #[serde(default)]
    with: BTreeMap<String, String>,
    #[serde(default)]
    vm: VmKind,
    theirs: Expected,
    ours: Option<Expected>,
    why: Option<String>,
    switch: Option<Value>,
}

#[derive(Clone, Copy, Default, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum VmKind {
    #[default]
    Plain,
    Annotated,
    Tokenless,
    Timeless,
}

/// The parts of an answer that a row states.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Expected {
    status: u16,
    #[serde(rename = "type")]
    content_type: Option<String>,
    body: Option<String>,
    #[serde(default)]
    has: BTreeMap<String, Value>,
}

impl Case {
    fn all() -> Vec<Self> {
        let table = include_str!("../kubevirt_imds/requests.yaml");
        serde_yaml::from_str(table).expect("a table of requests")
    }

    fn name(&self) -> String {
        format!("{} {:?} of a {:?} VM", self.ask, self.with, self.vm)
    }

    fn words(&self) -> (&str, &str) {
        self.ask.split_once(' ').expect("a method and a target")
    }

    fn answer(&self, switch: &Value) -> Answered {
        let (method, target) = self.words();
        let question = Question::get(target).by(Method::from_token(method));
        let question =
            self.with.iter().fold(question, |question, (name, value)| question.with(name, value.clone()));
        let response = question.ask(&answers(&record(self.vm, switch)));
        parts_of(&response)
    }
}

impl Expected {
    /// True if the answer has every stated part.
    fn matches(&self, found: &Answered, is_head: bool) -> bool {
        let text = String::from_utf8_lossy(&found.body);
        // Trailing newlines of a JSON document do not matter.
        let body = self
            .body
            .as_deref()
            .is_none_or(|body| is_head || text.trim_end_matches('\n') == body.trim_end_matches('\n'));
        let document = || serde_yaml::from_str(&text).unwrap_or(Value::Null);
        let has = self.has.is_empty() || {
            let document: Value = document();
            self.has.iter().all(|(name, value)| document[name] == *value)
        };
        let content_type = self.content_type.as_deref();
        let is_of_type = content_type.is_none_or(|wanted| found.field("Content-Type") == Some(wanted));
        found.status == self.status && is_of_type && body && has
    }
}

fn parts_of(response: &Response) -> Answered {
    let head = String::from_utf8(response.head().to_vec()).expect("text");
    Answered { status: response.status().0, head, body: response.body().to_bytes().to_vec() }
}

/// The VMI of the VM in kubevirt-imds' documentation.
fn vmi(annotations: &Value) -> Value {
    let vmi = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": {"name": "my-vm", "namespace": "default", "uid": "b5e7c9d2-0c3f-4a52-8f2e-3d9a1c7b6e10",
            "annotations": annotations},
        "spec": {
            "serviceAccountName": "my-service-account",
            "domain": {
                "firmware": {"uuid": "5d307ca9-b3ef-428c-8861-06e72d69f223",
                    "serial": "ds=nocloud;s=http://169.254.169.254/v1/"},
                "devices": {"disks": [{"name": "rootdisk", "disk": {"bus": "virtio"}}],
                    "interfaces": [{"name": "default", "masquerade": {}, "macAddress": MAC}]},
                "resources": {"requests": {"memory": "2Gi"}},
            },
            "networks": [{"name": "default", "pod": {}}],
            "volumes": [{"name": "rootdisk", "containerDisk": {"image": "quay.io/containerdisks/ubuntu:22.04"}}],
        },
        "status": {"phase": "Running", "activePods": {"p": "n1"}},
    });
    assert_eq!(Schemas::published().findings(&vmi), [""; 0], "KubeVirt would reject it");
    vmi
}

/// Translates a VMI whose pod has these volumes; `None` if the feed does not want it.
fn translated(vmi: &Value, volumes: &[(&str, &str, &str)], options: &Value) -> Option<Record> {
    let vmi = Vmi::from_value(vmi.clone()).expect("a VMI");
    let options: KubevirtOptions = serde_json::from_value(options.clone()).expect("options");
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
    let read = |volume: &str| {
        let files = volumes.iter().filter(|(name, ..)| *name == volume);
        let files: VolumeFiles =
            files.map(|(_, file, text)| ((*file).to_owned(), (*text).to_owned().into())).collect();
        Ok((!files.is_empty()).then_some(files))
    };
    if !is_wanted(&vmi, &options) {
        return None;
    }
    match translate(&vmi, &pod, &read, &options, &RecordLimits::DEFAULT).outcome {
        TranslationOutcome::Record(record) => Some(*record),
        outcome => panic!("{outcome:?}"),
    }
}

fn record(which: VmKind, switch: &Value) -> Record {
    let mut annotations =
        json!({"imds.kubevirt.io/enabled": "true", "imds.kubevirt.io/bridge-name": "k6t-eth0"});
    if which == VmKind::Annotated {
        annotations["imds.kubevirt.io/user-data"] = USER_DATA.into();
    }
    let token = match which {
        VmKind::Tokenless => None,
        VmKind::Timeless => Some(("imds-token", "token", "opaque")),
        VmKind::Plain | VmKind::Annotated => Some(("imds-token", "token", TOKEN)),
    };
    translated(&vmi(&annotations), token.as_slice(), switch).expect("it is served")
}

fn answers(record: &Record) -> Responses {
    render(record, &mut Interner::new(), VmState::alone(record.vm.uuid.as_str()))
}

#[test]
fn guests_get_the_same_answers_or_the_table_gives_a_reason() {
    for case in Case::all() {
        let is_head = case.words().0 == "HEAD";
        let (name, found) = (case.name(), case.answer(&json!({})));
        let shown = format!("{name}: {} {}", found.head, String::from_utf8_lossy(&found.body));
        assert_eq!(case.theirs.matches(&found, is_head), case.ours.is_none(), "{shown}");
        assert_eq!(
            case.why.is_some(),
            case.ours.is_some(),
            "{name}: a difference, and nothing else, needs a reason"
        );
        assert!(case.ours.as_ref().is_none_or(|ours| ours.matches(&found, is_head)), "{shown}");
        if let Some(switch) = &case.switch {
            let found = case.answer(switch);
            let shown = format!("{} {}", found.head, String::from_utf8_lossy(&found.body));
            assert!(case.theirs.matches(&found, is_head), "{name} with {switch}: {shown}");
        }
    }
}

#[privileged::test]
fn a_guest_on_a_tap_gets_the_answers_in_the_table() {
    for which in [VmKind::Plain, VmKind::Annotated, VmKind::Tokenless, VmKind::Timeless] {
        let host = Host::new().expect("a node");
        let guest = Guest::boot(&host, &Spec::of(&Identity::of(0))).expect("a guest");
        let records = tempfile::tempdir().expect("a directory");
        let text = record(which, &json!({})).to_json().expect("JSON");
        let mut text: Value = serde_json::from_str(&text).expect("JSON");
        text["network"]["nics"][0]["port"] = Value::Null;
        replace(&records.path().join("vm.json"), &text.to_string()).expect("a record");
        let port = PortArgument::new(guest.host_tap().name(), guest.identity().mac);
        let _agent = Agent::start(host.ns(), records.path(), &[port]).expect("an agent");
        for case in Case::all().into_iter().filter(|case| case.vm == which) {
            let found = guest.ns().run_in(|| request_over_tcp(&case));
            let expected = case.ours.as_ref().unwrap_or(&case.theirs);
            let shown = format!("{}: {} {}", case.name(), found.head, String::from_utf8_lossy(&found.body));
            assert!(expected.matches(&found, case.words().0 == "HEAD"), "{shown}");
        }
    }
}

fn request_over_tcp(case: &Case) -> Answered {
    let mut stream = TcpStream::connect_timeout(&(METADATA, 80).into(), PATIENCE).expect("a connection");
    stream.set_read_timeout(Some(PATIENCE)).expect("a limit");
    let fields: String = case.with.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let request =
        format!("{} HTTP/1.1\r\nHost: 169.254.169.254\r\n{fields}Connection: close\r\n\r\n", case.ask);
    stream.write_all(request.as_bytes()).expect("sent");
    let mut received = Vec::new();
    stream.read_to_end(&mut received).expect("an answer");
    responses(&received, &[case.words().0 == "HEAD"]).pop().expect("one answer")
}

#[test]
fn annotations_keep_their_meaning() {
    // The annotation's value; whether kubevirt-imds serves the VM, whether we do, and whether we do with `opt_in`.
    let cases = [
        (Some("true"), true, true, true),
        (Some("false"), false, false, false),
        // Without `opt_in`, every VM of a node is served.
        (None, false, true, false),
        (Some("yes"), false, true, false),
    ];
    for (value, there, here, opted) in cases {
        let annotations = value.map_or(json!({}), |value| json!({"imds.kubevirt.io/enabled": value}));
        let served = |options: Value| translated(&vmi(&annotations), &[], &options).is_some();
        assert_eq!(served(json!({})), here, "{value:?}");
        assert_eq!(served(json!({"opt_in": true})), opted, "{value:?}");
        assert_eq!(opted, there, "{value:?}: with `opt_in` both serve the same VMs");
    }
}

#[test]
fn documented_annotations_are_followed() {
    let volumes = [
        ("imds-user-data", "user-data", "#by reference\n"),
        ("imds-vendor-data", "vendor-data", "#vendor\n"),
    ];
    let inline = json!({"imds.kubevirt.io/user-data": USER_DATA, "imds.kubevirt.io/user-data-configmap": "c",
        "imds.kubevirt.io/vendor-data": "#inline\n"});
    for (annotations, user, vendor) in [
        (json!({}), None, None),
        (json!({"imds.kubevirt.io/user-data-configmap": "c"}), Some("#by reference\n"), None),
        (json!({"imds.kubevirt.io/user-data-secret": "s"}), Some("#by reference\n"), None),
        (json!({"imds.kubevirt.io/vendor-data-configmap": "c"}), None, Some("#vendor\n")),
        (json!({"imds.kubevirt.io/vendor-data-secret": "s"}), None, Some("#vendor\n")),
        // Inline data takes precedence.
        (inline, Some(USER_DATA), Some("#inline\n")),
        // Annotations that only the sidecar of kubevirt-imds reads.
        (
            json!({"imds.kubevirt.io/bridge-name": "k6t-eth0", "imds.kubevirt.io/injected": "true"}),
            None,
            None,
        ),
    ] {
        let record = translated(&vmi(&annotations), &volumes, &json!({})).expect("it is served");
        let answers = answers(&record);
        for (path, expected) in [("/v1/user-data", user), ("/v1/vendor-data", vendor)] {
            let found = parts_of(&Question::get(path).ask(&answers));
            let found = (found.status, String::from_utf8(found.body).expect("text"));
            let expected = expected.map_or((204, String::new()), |text| (200, text.to_owned()));
            assert_eq!(found, expected, "{annotations} {path}");
        }
    }
}

#[test]
fn the_request_rate_is_the_same_and_the_burst_is_configurable() {
    let limit = |switch: Value| {
        let limit = answers(&record(VmKind::Plain, &switch)).limit();
        (limit.per_second, limit.burst)
    };
    // kubevirt-imds allows 100 requests per second and a burst of 100, fewer than a booting guest sends at once.
    assert_eq!(limit(json!({})), (100, 400));
    assert_eq!(limit(json!({"serve": {"limits": {"burst": 100}}})), (100, 100));
}
