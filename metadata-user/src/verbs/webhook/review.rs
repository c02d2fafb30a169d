//! `AdmissionReview` of `admission.k8s.io/v1`
//! (<https://kubernetes.io/docs/reference/access-authn-authz/extensible-admission-controllers/>).
//!
//! Every request is allowed, so that the webhook prevents nobody from creating a VM.
//!
//! We do not use kube's types (`kube::core::admission`): they require fields that we do not read, need another crate
//! for patches, and would add the Kubernetes client to this crate.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use metadata_content::parser::{self, ParseError};
use metadata_content::record::values::is_uuid;
use metadata_feed::kubevirt;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

const VERSION: &str = "admission.k8s.io/v1";
const KIND: &str = "AdmissionReview";
/// Maximum length of a UID, in bytes; Kubernetes' UIDs have 36.
const UID_MAX: usize = 256;
/// Maximum length of a name and of a namespace in the log, in bytes; Kubernetes accepts no longer name.
pub const LOGGED_NAME: usize = 253;

/// The reason why a review gets no answer.
#[derive(Debug, thiserror::Error)]
pub enum ReviewError {
    /// The body is not JSON, or lacks a field.
    #[error("expected an AdmissionReview of admission.k8s.io/v1, found: {0}")]
    Malformed(#[from] ParseError),
    /// The answer cannot be written.
    #[error("cannot write the answer to an AdmissionReview: {0}")]
    Unwritable(#[from] serde_json::Error),
    /// The body has another version or kind.
    #[error(
        "expected {KIND} of {VERSION}, found {kind} of {version}; `admissionReviewVersions` must be [v1]"
    )]
    Version {
        /// The kind found.
        kind: String,
        /// The version found.
        version: String,
    },
    /// The UID is too long.
    #[error("expected a uid of at most {UID_MAX} bytes, found {0}")]
    Uid(usize),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ReviewRequest {
    api_version: String,
    kind: String,
    request: Request,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Request {
    uid: String,
    operation: String,
    #[serde(default)]
    namespace: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    object: Value,
    /// The object before an update.
    #[serde(default)]
    old_object: Value,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Answer {
    api_version: &'static str,
    kind: &'static str,
    response: Response,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Response {
    uid: String,
    allowed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch_type: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
}

/// The answer to a review, and the changes to log.
#[derive(Debug)]
pub struct ReviewResponse {
    /// The body to send.
    pub body: Vec<u8>,
    /// `<namespace>/<name>` of the changed object (`<prefix>*` before it has a name), and the paths that change.
    pub changed: Option<(String, Vec<String>)>,
}

/// Decides the changes to an object from the operation and its present and previous forms.
pub type DecideChanges = fn(AdmissionOperation, &Value, &Value) -> ObjectChanges;

/// Answers a review.
///
/// # Errors
/// [`ReviewError`]: the body is not a review.
pub fn answer(body: &[u8], judge: DecideChanges) -> Result<ReviewResponse, ReviewError> {
    let ReviewRequest { api_version: version, kind, request } = parser::json(body)?;
    if version != VERSION || kind != KIND {
        let short = |text: String| text.chars().take(64).collect();
        return Err(ReviewError::Version { kind: short(kind), version: short(version) });
    }
    if request.uid.len() > UID_MAX {
        return Err(ReviewError::Uid(request.uid.len()));
    }
    let judged = match &*request.operation {
        "CREATE" => judge(AdmissionOperation::Create, &request.object, &Value::Null),
        "UPDATE" => judge(AdmissionOperation::Update, &request.object, &request.old_object),
        _ => ObjectChanges::default(),
    };
    let patch = (!judged.changes.is_empty()).then(|| serde_json::to_vec(&judged.changes)).transpose()?;
    let name = name_of(&request);
    let response = Response {
        uid: request.uid,
        allowed: true,
        patch_type: patch.is_some().then_some("JSONPatch"),
        patch: patch.map(|patch| STANDARD.encode(patch)),
        warnings: judged.warnings,
    };
    let paths: Vec<_> = judged.changes.into_iter().map(|change| change.path).collect();
    let namespace = cut(&request.namespace, LOGGED_NAME);
    let changed = (!paths.is_empty()).then(|| (format!("{namespace}/{name}"), paths));
    let body = serde_json::to_vec(&Answer { api_version: VERSION, kind: KIND, response })?;
    Ok(ReviewResponse { body, changed })
}

/// The first bytes of a text, up to the end of a character.
pub(super) fn cut(text: &str, most: usize) -> &str {
    &text[..text.floor_char_boundary(most)]
}

/// The object's name, cut to [`LOGGED_NAME`] bytes: whoever reaches the webhook may send any. A new object may have
/// only a prefix, from which the API server generates the name later.
fn name_of(request: &Request) -> String {
    let of = |field: &str| request.object["metadata"][field].as_str().filter(|name| !name.is_empty());
    let given = Some(&*request.name).filter(|name| !name.is_empty()).or_else(|| of("name"));
    let generated = || of("generateName").map(|prefix| format!("{}*", cut(prefix, LOGGED_NAME)));
    given
        .map(|name| cut(name, LOGGED_NAME).to_owned())
        .or_else(generated)
        .unwrap_or_else(|| "(unnamed)".into())
}

// Decides the changes to a VirtualMachine. The functions are pure.
//
// | `imds.kubevirt.io/…` of the template | |
// |---|---|
// | `enabled: "true"` | needed for any change |
// | `datasource` | `nocloud` (default) sets the serial; `openstack` sets the chassis' asset tag |
// | `replace-serial: "true"` | existing VMs are changed too, and a serial that is only a UUID is replaced |
//
// A user or a GitOps tool that applies a manifest again sends the serial without [`SERIAL`]. The webhook then appends
// [`SERIAL`] again, unless `enabled` is no longer `"true"`.
//
// Values of the user are kept, except the UUID that `replace-serial` replaces: [`SERIAL`] is appended to a serial. A
// serial that contains `ds=` stays unchanged, and so does an asset tag that is not empty. cloud-init finds [`SERIAL`]
// after any blank. If a new VM has no serial, KubeVirt 1.7 and later set a random UUID. This webhook must run before
// KubeVirt's, because otherwise it appends to that UUID.

/// The text in the serial number that tells cloud-init where NoCloud's seed is. `dsmode=net` says that the seed needs
/// the network. Without `dsmode=net`, cloud-init 22.4 (Debian 12) searches before the network is up and ignores a seed
/// that it fetches later.
pub const SERIAL: &str = "ds=nocloud;dsmode=net;s=http://169.254.169.254/v1/";
/// The asset tag by which cloud-init and cloudbase-init recognize OpenStack.
pub const ASSET: &str = "OpenStack Nova";

const ENABLED: &str = "imds.kubevirt.io/enabled";
const DATASOURCE: &str = "imds.kubevirt.io/datasource";
const REPLACE: &str = "imds.kubevirt.io/replace-serial";
const DOMAIN: &str = "/spec/template/spec/domain";

/// The operation on a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdmissionOperation {
    /// The VM is new.
    Create,
    /// The VM exists.
    Update,
}

/// An operation of a JSON patch (RFC 6902). `add` replaces a value that exists.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PatchOperation {
    op: &'static str,
    /// JSON pointer to the value (RFC 6901).
    pub path: String,
    /// The new value.
    pub value: Value,
}

impl PatchOperation {
    pub(super) fn add(path: String, value: Value) -> Self {
        Self { op: "add", path, value }
    }
}

/// The changes to an object.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ObjectChanges {
    /// The changes, in the order of application.
    pub changes: Vec<PatchOperation>,
    /// Messages for the user who sent the request, one line each.
    pub warnings: Vec<String>,
}

/// Returns the changes to a VirtualMachine. `old` is the VM before an update, or null for a new VM.
#[must_use]
pub fn judge_vm(operation: AdmissionOperation, vm: &Value, old: &Value) -> ObjectChanges {
    let annotation = |name: &str| vm.pointer("/spec/template/metadata/annotations")?.get(name)?.as_str();
    let replaces = annotation(REPLACE) == Some("true");
    let Some(domain) = vm.pointer(DOMAIN).filter(|domain| domain.is_object()) else {
        return ObjectChanges::default();
    };
    let is_due = operation == AdmissionOperation::Create || replaces || was_pointed_here(old);
    if annotation(ENABLED) != Some("true") || !is_due {
        return ObjectChanges::default();
    }
    match annotation(DATASOURCE).unwrap_or("nocloud") {
        "nocloud" => set(domain, "firmware", "serial", |serial| wanted(serial, replaces)),
        "openstack" => set(domain, "chassis", "asset", |asset| asset.is_empty().then(|| ASSET.into())),
        other => {
            let shown: String = other.chars().take(64).collect();
            let warning =
                format!("{DATASOURCE}: expected nocloud or openstack, found {shown:?}; nothing was set");
            ObjectChanges { changes: Vec::new(), warnings: vec![warning] }
        }
    }
}

/// True if the serial ends with [`SERIAL`] or the asset tag is [`ASSET`].
fn was_pointed_here(vm: &Value) -> bool {
    let text = |path: &str| vm.pointer(DOMAIN)?.pointer(path)?.as_str();
    text("/firmware/serial").is_some_and(|serial| serial.ends_with(SERIAL))
        || text("/chassis/asset") == Some(ASSET)
}

/// The new serial, or `None` if the serial stays unchanged.
fn wanted(serial: &str, replaces: bool) -> Option<String> {
    match serial {
        "" => Some(SERIAL.into()),
        _ if serial.contains("ds=") => None,
        _ if replaces && is_uuid(serial) => Some(SERIAL.into()),
        _ => Some(format!("{serial} {SERIAL}")),
    }
}

/// Sets `field` in `part` of the domain. Either may be missing.
fn set(domain: &Value, part: &str, field: &str, wanted: impl Fn(&str) -> Option<String>) -> ObjectChanges {
    let inner = domain.get(part).filter(|inner| !inner.is_null());
    let present = match inner.map(|inner| inner.get(field).unwrap_or(&Value::Null)) {
        None | Some(Value::Null) => "",
        Some(Value::String(text)) => text,
        // The API server refuses a serial that is not text.
        Some(_) => return ObjectChanges::default(),
    };
    let change = wanted(present).map(|text| match inner {
        Some(_) => PatchOperation::add(format!("{DOMAIN}/{part}/{field}"), text.into()),
        None => PatchOperation::add(format!("{DOMAIN}/{part}"), json!({ field: text })),
    });
    ObjectChanges { changes: change.into_iter().collect(), warnings: Vec::new() }
}

// Adds volumes to a launcher's pod. kubelet mounts them, and the agent reads them from the host.
//
// | annotation of the pod, besides `imds.kubevirt.io/enabled: "true"` | volume |
// |---|---|
// | none | `imds-token`: a token of the pod's service account, renewed by kubelet |
// | `user-data-secret`, `user-data-configmap`, without `user-data` | `imds-user-data` |
// | `vendor-data-secret`, `vendor-data-configmap`, without `vendor-data` | `imds-vendor-data` |
//
// KubeVirt copies a VM's annotations to its pods. kubelet mounts only volumes that a container mounts, so the
// launcher's container mounts them, although no program there reads them. An existing volume of that name stays
// unchanged.

/// KubeVirt's label of launchers' pods, and its value.
const LAUNCHER: (&str, &str) = ("kubevirt.io", "virt-launcher");
/// The container that every launcher has.
const CONTAINER: &str = "compute";
/// The directory of the volumes in that container.
const MOUNTS: &str = "/var/run/xdp-imds";
/// Mode 0400: only root reads the files. kubelet may add permissions.
const MODE: u32 = 0o400;
/// Lifetime of a token, in seconds. kubelet renews a token when a fifth of its lifetime is left.
const TOKEN_SECONDS: u32 = 3_600;

/// Returns the changes to a new pod. A pod's volumes cannot change later.
#[must_use]
pub fn judge_pod(operation: AdmissionOperation, pod: &Value, _old: &Value) -> ObjectChanges {
    if operation != AdmissionOperation::Create {
        return ObjectChanges::default();
    }
    let metadata = &pod["metadata"];
    let annotation = |name: &str| metadata["annotations"][name].as_str().filter(|text| !text.is_empty());
    let is_launcher = metadata["labels"][LAUNCHER.0] == LAUNCHER.1;
    let containers = pod["spec"]["containers"].as_array().map(Vec::as_slice).unwrap_or_default();
    let at = containers.iter().position(|container| container["name"] == CONTAINER);
    let Some(at) = at.filter(|_| is_launcher && annotation(kubevirt::ENABLED) == Some("true")) else {
        return ObjectChanges::default();
    };
    let mut wanted = vec![("token", token())];
    for (field, inline, secret, map) in [
        ("user-data", kubevirt::USER_DATA, kubevirt::USER_DATA_SECRET, kubevirt::USER_DATA_CONFIGMAP),
        ("vendor-data", kubevirt::VENDOR_DATA, kubevirt::VENDOR_DATA_SECRET, kubevirt::VENDOR_DATA_CONFIGMAP),
    ] {
        let source = match (annotation(secret), annotation(map)) {
            // The agent prefers the inline value.
            _ if metadata["annotations"][inline].is_string() => continue,
            (Some(name), _) => json!({"secret": {"secretName": name, "defaultMode": MODE}}),
            (None, Some(name)) => json!({"configMap": {"name": name, "defaultMode": MODE}}),
            (None, None) => continue,
        };
        wanted.push((field, source));
    }
    let mut lists =
        VolumeLists { volumes: &pod["spec"]["volumes"], mounts: &containers[at]["volumeMounts"], at };
    ObjectChanges { changes: lists.with(wanted), warnings: Vec::new() }
}

fn token() -> Value {
    let token = json!({"path": "token", "expirationSeconds": TOKEN_SECONDS});
    json!({"projected": {"sources": [{"serviceAccountToken": token}], "defaultMode": MODE}})
}

/// The pod's lists of volumes and mounts. Both may be missing.
struct VolumeLists<'a> {
    volumes: &'a Value,
    mounts: &'a Value,
    at: usize,
}

impl VolumeLists<'_> {
    fn with(&mut self, wanted: Vec<(&str, Value)>) -> Vec<PatchOperation> {
        let present = self.volumes.as_array().map(Vec::as_slice).unwrap_or_default();
        let is_there = |name: &str| present.iter().any(|volume| volume["name"] == name);
        let missing = wanted.into_iter().map(|(field, source)| (kubevirt::volume(field), source));
        let (mut volumes, mut mounts) = (Vec::new(), Vec::new());
        for (name, mut volume) in missing.filter(|(name, _)| !is_there(name)) {
            mounts.push(json!({"name": name, "mountPath": format!("{MOUNTS}/{name}"), "readOnly": true}));
            volume["name"] = name.into();
            volumes.push(volume);
        }
        let mut changes = append(self.volumes, "/spec/volumes", volumes);
        changes.extend(append(self.mounts, &format!("/spec/containers/{}/volumeMounts", self.at), mounts));
        changes
    }
}

/// Appends to a list, or creates it.
fn append(list: &Value, path: &str, items: Vec<Value>) -> Vec<PatchOperation> {
    match list.is_array() {
        _ if items.is_empty() => Vec::new(),
        true => items.into_iter().map(|item| PatchOperation::add(format!("{path}/-"), item)).collect(),
        false => vec![PatchOperation::add(path.to_owned(), items.into())],
    }
}

#[cfg(test)]
mod tests {
    use base64::Engine as _;
    use serde_json::{Value, json};

    use super::{
        ASSET, AdmissionOperation, LOGGED_NAME, PatchOperation, ReviewError, ReviewResponse, SERIAL, STANDARD,
    };
    use crate::verbs::webhook::review::{ObjectChanges, judge_pod, judge_vm};

    fn answer(body: &[u8]) -> Result<ReviewResponse, ReviewError> {
        super::answer(body, judge_vm)
    }

    fn review(operation: &str, annotations: &Value) -> Value {
        json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
            "uid": "705ab4f5-6393-11e8-b7cc-42010a800002", "operation": operation, "namespace": "n", "name": "vm-a",
            "object": {"spec": {"template": {"metadata": {"annotations": annotations}, "spec": {"domain": {}}}}},
            "oldObject": null, "dryRun": false}})
    }

    #[test]
    fn the_answer_has_the_questions_uid_and_a_patch() {
        let question = review("CREATE", &json!({"imds.kubevirt.io/enabled": "true"}));
        let reviewed = answer(question.to_string().as_bytes()).expect("an answer");
        let said: Value = serde_json::from_slice(&reviewed.body).expect("JSON");
        assert_eq!(said["apiVersion"], "admission.k8s.io/v1");
        assert_eq!(said["response"]["uid"], "705ab4f5-6393-11e8-b7cc-42010a800002");
        assert_eq!(
            (&said["response"]["allowed"], &said["response"]["patchType"]),
            (&json!(true), &json!("JSONPatch"))
        );
        let patch = STANDARD.decode(said["response"]["patch"].as_str().expect("a patch")).expect("base64");
        let patch: Value = serde_json::from_slice(&patch).expect("JSON");
        assert_eq!(patch[0]["op"], "add");
        assert_eq!(reviewed.changed.expect("changed").0, "n/vm-a");
    }

    #[test]
    fn the_log_names_an_object_also_before_it_has_its_name() {
        for (name, metadata, expected) in [
            ("vm-a", json!({"generateName": "vm-"}), "n/vm-a"),
            ("", json!({"name": "vm-b", "generateName": "vm-"}), "n/vm-b"),
            ("", json!({"name": "", "generateName": "virt-launcher-vm-a-"}), "n/virt-launcher-vm-a-*"),
            ("", json!({}), "n/(unnamed)"),
        ] {
            let mut question = review("CREATE", &json!({"imds.kubevirt.io/enabled": "true"}));
            question["request"]["name"] = json!(name);
            question["request"]["object"]["metadata"] = metadata;
            let changed = answer(question.to_string().as_bytes()).expect("an answer").changed;
            assert_eq!(changed.expect("changed").0, expected);
        }
    }

    #[test]
    fn a_name_in_the_log_is_no_longer_than_one_that_kubernetes_accepts() {
        let long = "ä".repeat(100_000);
        let cut = "ä".repeat(LOGGED_NAME / 2);
        for (name, metadata, star) in [
            (&*long, json!({}), ""),
            ("", json!({"name": long}), ""),
            ("", json!({"generateName": long}), "*"),
        ] {
            let mut question = review("CREATE", &json!({"imds.kubevirt.io/enabled": "true"}));
            question["request"]["name"] = json!(name);
            question["request"]["namespace"] = json!(long);
            question["request"]["object"]["metadata"] = metadata;
            let changed = answer(question.to_string().as_bytes()).expect("an answer").changed;
            assert_eq!(changed.expect("changed").0, format!("{cut}/{cut}{star}"));
        }
    }

    #[test]
    fn a_request_without_changes_is_allowed_without_a_patch() {
        for (operation, annotations) in [
            ("CREATE", json!({})),
            ("DELETE", json!({"imds.kubevirt.io/enabled": "true"})),
            ("UPDATE", json!({"imds.kubevirt.io/enabled": "true"})),
        ] {
            let reviewed = answer(review(operation, &annotations).to_string().as_bytes()).expect("an answer");
            let said: Value = serde_json::from_slice(&reviewed.body).expect("JSON");
            let response = said["response"].as_object().expect("an object");
            assert_eq!(response["allowed"], json!(true), "{operation}");
            assert!(!response.contains_key("patch") && !response.contains_key("patchType"), "{operation}");
            assert!(reviewed.changed.is_none(), "{operation}");
        }
    }

    #[test]
    fn other_versions_and_malformed_reviews_are_refused() {
        let mut beta = review("CREATE", &json!({}));
        beta["apiVersion"] = json!("admission.k8s.io/v1beta1");
        let refused = answer(beta.to_string().as_bytes()).expect_err("not v1");
        assert!(matches!(refused, ReviewError::Version { .. }), "{refused}");
        let mut long = review("CREATE", &json!({}));
        long["request"]["uid"] = json!("u".repeat(257));
        assert!(matches!(answer(long.to_string().as_bytes()), Err(ReviewError::Uid(257))));
        for other in
            ["", "{}", "[]", "null", r#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview"}"#]
        {
            let refused = answer(other.as_bytes()).expect_err(other);
            assert!(matches!(refused, ReviewError::Malformed(_)), "{other}: {refused}");
        }
    }

    fn vm(annotations: &Value, domain: &Value) -> Value {
        json!({"spec": {"template": {"metadata": {"annotations": annotations}, "spec": {"domain": domain}}}})
    }

    fn serial(operation: AdmissionOperation, annotations: &Value, serial: &Value) -> Option<Value> {
        let judged =
            judge_vm(operation, &vm(annotations, &json!({"firmware": {"serial": serial}})), &Value::Null);
        assert!(judged.warnings.is_empty() && judged.changes.len() < 2, "{judged:?}");
        judged.changes.into_iter().next().map(|change| {
            assert_eq!(change.path, "/spec/template/spec/domain/firmware/serial");
            change.value
        })
    }

    #[test]
    fn a_serial_is_set_or_appended_to_and_never_lost() {
        let on = json!({"imds.kubevirt.io/enabled": "true"});
        let uuid = "6a1a24a1-4061-4607-8bf4-a3963d0c5895";
        for (present, expected) in [
            (json!(null), Some(SERIAL.to_owned())),
            (json!(""), Some(SERIAL.to_owned())),
            (json!("ABC 123"), Some(format!("ABC 123 {SERIAL}"))),
            (json!(uuid), Some(format!("{uuid} {SERIAL}"))),
            (json!("x ds=openstack"), None),
            (json!(SERIAL), None),
            (json!(7), None),
        ] {
            assert_eq!(
                serial(AdmissionOperation::Create, &on, &present),
                expected.map(Value::from),
                "{present}"
            );
        }
    }

    #[test]
    fn an_existing_vm_is_changed_only_on_request() {
        let uuid = "6a1a24a1-4061-4607-8bf4-a3963d0c5895";
        let on = json!({"imds.kubevirt.io/enabled": "true"});
        let replace = json!({"imds.kubevirt.io/enabled": "true", "imds.kubevirt.io/replace-serial": "true"});
        let off = json!({"imds.kubevirt.io/enabled": "false", "imds.kubevirt.io/replace-serial": "true"});
        for (annotations, present, expected) in [
            (&on, uuid, None),
            (&on, "", None),
            (&off, uuid, None),
            (&replace, uuid, Some(SERIAL.to_owned())),
            (&replace, "mine", Some(format!("mine {SERIAL}"))),
            (&replace, "ds=nocloud", None),
        ] {
            let found = serial(AdmissionOperation::Update, annotations, &json!(present));
            assert_eq!(found, expected.map(Value::from), "{annotations} {present}");
        }
    }

    #[test]
    fn the_users_other_values_are_kept() {
        let on = json!({"imds.kubevirt.io/enabled": "true"});
        let judged = judge_vm(AdmissionOperation::Create, &vm(&on, &json!({"cpu": {}})), &Value::Null);
        let path = "/spec/template/spec/domain/firmware".to_owned();
        assert_eq!(judged.changes, [PatchOperation::add(path, json!({"serial": SERIAL}))]);
        let judged =
            judge_vm(AdmissionOperation::Create, &vm(&on, &json!({"firmware": {"uuid": "u"}})), &Value::Null);
        assert_eq!(judged.changes[0].path, "/spec/template/spec/domain/firmware/serial");
    }

    #[test]
    fn openstack_sets_the_asset_tag_and_keeps_the_serial() {
        let on = json!({"imds.kubevirt.io/enabled": "true", "imds.kubevirt.io/datasource": "openstack"});
        for (chassis, expected) in [
            (json!(null), Some(("/spec/template/spec/domain/chassis", json!({"asset": ASSET})))),
            (json!({"sku": "s"}), Some(("/spec/template/spec/domain/chassis/asset", json!(ASSET)))),
            (json!({"asset": "OpenTelekomCloud"}), None),
        ] {
            let judged =
                judge_vm(AdmissionOperation::Create, &vm(&on, &json!({"chassis": chassis})), &Value::Null);
            let expected: Vec<_> =
                expected.map(|(path, value)| PatchOperation::add(path.into(), value)).into_iter().collect();
            assert_eq!(judged.changes, expected, "{chassis}");
        }
    }

    #[test]
    fn an_unknown_datasource_warns_and_changes_nothing() {
        let on = json!({"imds.kubevirt.io/enabled": "true", "imds.kubevirt.io/datasource": "x".repeat(100)});
        let judged = judge_vm(AdmissionOperation::Create, &vm(&on, &json!({})), &Value::Null);
        assert!(judged.changes.is_empty() && judged.warnings.len() == 1, "{judged:?}");
        assert!(judged.warnings[0].contains(&"x".repeat(64)) && judged.warnings[0].len() < 200);
    }

    #[test]
    fn an_object_that_is_no_vm_stays_unchanged() {
        for other in [json!(null), json!([]), json!({"spec": 1}), vm(&json!(null), &json!({}))] {
            assert_eq!(
                judge_vm(AdmissionOperation::Create, &other, &Value::Null),
                ObjectChanges::default(),
                "{other}"
            );
        }
        let on = json!({"imds.kubevirt.io/enabled": "true"});
        assert_eq!(
            judge_vm(AdmissionOperation::Create, &vm(&on, &json!(null)), &Value::Null),
            ObjectChanges::default()
        );
    }

    #[test]
    fn missing_lists_are_created() {
        let pod = json!({
            "metadata": {"labels": {"kubevirt.io": "virt-launcher"},
                "annotations": {"imds.kubevirt.io/enabled": "true"}},
            "spec": {"containers": [{"name": "other"}, {"name": "compute"}]},
        });
        let paths: Vec<_> = judge_pod(AdmissionOperation::Create, &pod, &Value::Null)
            .changes
            .into_iter()
            .map(|change| change.path)
            .collect();
        assert_eq!(paths, ["/spec/volumes", "/spec/containers/1/volumeMounts"]);
    }

    #[test]
    fn a_pod_that_is_no_launcher_stays_unchanged() {
        let annotated = json!({"annotations": {"imds.kubevirt.io/enabled": "true"}});
        let launcher = json!({"labels": {"kubevirt.io": "virt-launcher"},
            "annotations": {"imds.kubevirt.io/enabled": "true"}});
        for other in [
            json!(null),
            json!([]),
            json!({"metadata": annotated, "spec": {"containers": [{"name": "compute"}]}}),
            json!({"metadata": launcher, "spec": {"containers": [{"name": "compute-2"}]}}),
            json!({"metadata": launcher, "spec": {"containers": 1}}),
        ] {
            assert_eq!(
                judge_pod(AdmissionOperation::Create, &other, &Value::Null),
                ObjectChanges::default(),
                "{other}"
            );
        }
    }
}
