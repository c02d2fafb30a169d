//! Decides the changes to a VirtualMachine. The functions are pure.
//!
//! | `imds.kubevirt.io/…` of the template | |
//! |---|---|
//! | `enabled: "true"` | needed for any change |
//! | `datasource` | `nocloud` (default) sets the serial; `openstack` sets the chassis' asset tag |
//! | `replace-serial: "true"` | existing VMs are changed too, and a serial that is only a UUID is replaced |
//!
//! A user or a GitOps tool that applies a manifest again sends the serial without [`SERIAL`]. The webhook then appends
//! [`SERIAL`] again, unless `enabled` is no longer `"true"`.
//!
//! Values of the user are kept, except the UUID that `replace-serial` replaces: [`SERIAL`] is appended to a serial. A
//! serial that contains `ds=` stays unchanged, and so does an asset tag that is not empty. cloud-init finds [`SERIAL`]
//! after any blank. If a new VM has no serial, KubeVirt 1.7 and later set a random UUID. This webhook must run before
//! KubeVirt's, because otherwise it appends to that UUID.

use metadata_content::record::values::is_uuid;
use serde::Serialize;
use serde_json::{Value, json};

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
pub fn judge(operation: AdmissionOperation, vm: &Value, old: &Value) -> ObjectChanges {
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

#[cfg(test)]
mod tests {
    use super::{ASSET, AdmissionOperation, ObjectChanges, PatchOperation, SERIAL, judge};
    use serde_json::{Value, json};

    fn vm(annotations: &Value, domain: &Value) -> Value {
        json!({"spec": {"template": {"metadata": {"annotations": annotations}, "spec": {"domain": domain}}}})
    }

    fn serial(operation: AdmissionOperation, annotations: &Value, serial: &Value) -> Option<Value> {
        let judged =
            judge(operation, &vm(annotations, &json!({"firmware": {"serial": serial}})), &Value::Null);
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
        let judged = judge(AdmissionOperation::Create, &vm(&on, &json!({"cpu": {}})), &Value::Null);
        let path = "/spec/template/spec/domain/firmware".to_owned();
        assert_eq!(judged.changes, [PatchOperation::add(path, json!({"serial": SERIAL}))]);
        let judged =
            judge(AdmissionOperation::Create, &vm(&on, &json!({"firmware": {"uuid": "u"}})), &Value::Null);
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
                judge(AdmissionOperation::Create, &vm(&on, &json!({"chassis": chassis})), &Value::Null);
            let expected: Vec<_> =
                expected.map(|(path, value)| PatchOperation::add(path.into(), value)).into_iter().collect();
            assert_eq!(judged.changes, expected, "{chassis}");
        }
    }

    #[test]
    fn an_unknown_datasource_warns_and_changes_nothing() {
        let on = json!({"imds.kubevirt.io/enabled": "true", "imds.kubevirt.io/datasource": "x".repeat(100)});
        let judged = judge(AdmissionOperation::Create, &vm(&on, &json!({})), &Value::Null);
        assert!(judged.changes.is_empty() && judged.warnings.len() == 1, "{judged:?}");
        assert!(judged.warnings[0].contains(&"x".repeat(64)) && judged.warnings[0].len() < 200);
    }

    #[test]
    fn an_object_that_is_no_vm_stays_unchanged() {
        for other in [json!(null), json!([]), json!({"spec": 1}), vm(&json!(null), &json!({}))] {
            assert_eq!(
                judge(AdmissionOperation::Create, &other, &Value::Null),
                ObjectChanges::default(),
                "{other}"
            );
        }
        let on = json!({"imds.kubevirt.io/enabled": "true"});
        assert_eq!(
            judge(AdmissionOperation::Create, &vm(&on, &json!(null)), &Value::Null),
            ObjectChanges::default()
        );
    }
}
