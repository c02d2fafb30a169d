//! Translates a VMI and its pod into a record. This module reads only through its arguments.

mod data;
mod keys;
mod names;
mod nics;
mod problem;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use metadata_common::mac::Mac;
use serde_json::{Value, json};

pub use data::{METADATA_CHARS, METADATA_KEYS};
pub use keys::{KEY_BYTES, KEY_BYTES_PER_VM, KEYS_PER_SECRET, KEYS_PER_VM, KeyError, PublicKeys};
pub use problem::{MAX_PROBLEMS, Problem};

use super::annotations::{ENABLED, INSTANCE_TYPES};
use super::{InstanceId, Options, Vmi};
use crate::pods::Pod;
use data::{Data, Network, Places, data};
use metadata_base::port::PortName;
use metadata_content::record::{Credential, Limits, Record, USER_DATA_MAX};
use nics::{Nics, Served, nics};

/// The files of one volume, by name.
pub type Files = BTreeMap<String, Bytes>;

/// The volumes of one pod, as a translation reads them.
pub trait PodVolumes {
    /// The files of a volume; `None` if it does not exist yet.
    ///
    /// # Errors
    /// The reason, which must not repeat any content.
    fn files(&self, volume: &str) -> Result<Option<Files>, String>;

    /// The public keys of a volume that holds the Secret of an access credential; `None` if it does not exist yet.
    ///
    /// # Errors
    /// Like [`files`](Self::files).
    fn public_keys(&self, volume: &str) -> Result<Option<Arc<PublicKeys>>, String> {
        Ok(self.files(volume)?.map(|files| Arc::new(PublicKeys::parse(&files))))
    }
}

impl<F: Fn(&str) -> Result<Option<Files>, String>> PodVolumes for F {
    fn files(&self, volume: &str) -> Result<Option<Files>, String> {
        self(volume)
    }
}

/// The service account of a pod that names none.
const DEFAULT_ACCOUNT: &str = "default";
/// Longest host name in octets (RFC 1123 §2.1); KubeVirt cuts at the same length.
const HOSTNAME_OCTETS: usize = 63;

/// The result of a translation.
#[derive(Clone, Debug, PartialEq)]
pub struct Translation {
    /// What to publish.
    pub outcome: Outcome,
    /// The parts that cannot be served, or not yet.
    pub problems: Vec<Problem>,
    /// The source MAC of the inlet that the pod needs, if it needs one.
    pub inlet: Option<Mac>,
}

/// What to publish for a VMI.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// The complete record, with generation 0: the caller knows the last generation.
    Record(Box<Record>),
    /// The identities are known, but their data is not complete yet.
    Expect(Vec<(PortName, Mac)>),
    /// No NIC can be served.
    Unserved,
}

/// True if the options and the VMI's annotations ask for service.
#[must_use]
pub fn is_wanted(vmi: &Vmi, options: &Options) -> bool {
    let named = options.namespaces.is_empty() || options.namespaces.contains(&vmi.metadata.namespace);
    let enabled = vmi.annotation(ENABLED).map(str::trim);
    let enabled = if options.opt_in { enabled == Some("true") } else { enabled != Some("false") };
    named && enabled && !vmi.is_final()
}

/// Makes the record of a VMI in a pod, with the data in the pod's volumes.
#[must_use]
pub fn translate(
    vmi: &Vmi,
    pod: &Pod,
    read: &dyn PodVolumes,
    options: &Options,
    limits: &Limits,
) -> Translation {
    let mut problems = Vec::new();
    let Nics { served: nics, inlet } = nics(vmi, pod, options, &mut problems);
    if nics.is_empty() {
        return Translation { outcome: Outcome::Unserved, problems: problem::first_of(problems), inlet };
    }
    let found = data(&Places { vmi, read, options }, &mut problems);
    let record = match problems.iter().any(Problem::withholds) {
        true => None,
        false => match record(vmi, &nics, found, options, limits, &mut problems) {
            Ok(record) => Some(record),
            Err(reason) => {
                problems.push(Problem::Record(reason));
                None
            }
        },
    };
    let outcome = match record {
        Some(record) => Outcome::Record(Box::new(record)),
        None => Outcome::Expect(nics.into_iter().map(|nic| (nic.port, nic.mac)).collect()),
    };
    Translation { outcome, problems: problem::first_of(problems), inlet }
}

/// Assembles the record. It goes through the parser of record files, so that the same rules apply.
fn record(
    vmi: &Vmi,
    nics: &[Served],
    mut found: Data,
    options: &Options,
    limits: &Limits,
    problems: &mut Vec<Problem>,
) -> Result<Record, String> {
    let (user, vendor, token) = (found.user.take(), found.vendor.take(), found.token.take());
    let document = document(vmi, nics, found, options, token.is_some());
    let (mut record, _) =
        Record::parse_within(limits, "vmi.json", &document.to_string()).map_err(|error| error.to_string())?;
    // Never by what the VMI says of itself.
    record.vm.owner = Some(vmi.owner());
    (record.user_data, record.vendor_data) = (user.map(Into::into), vendor.map(Into::into));
    record.serve = options.serve.clone();
    // A Secret may be as large as this limit, and KubeVirt accepts it whole.
    record.serve.limits.user_data = USER_DATA_MAX;
    if let Some(token) = token
        && record.credentials.resolve(Credential::ServiceAccount, &token).is_err()
    {
        problems.push(Problem::Token);
        record.credentials.service_account.iter_mut().for_each(|account| account.token = None);
    }
    Ok(record)
}

/// The record as a document, without payloads.
fn document(vmi: &Vmi, nics: &[Served], found: Data, options: &Options, with_token: bool) -> Value {
    let (meta, spec) = (&vmi.metadata, &vmi.spec);
    let number = options.account_of(&meta.namespace);
    let mut document = json!({
        "schema": "vmrecord/1",
        "generation": 0,
        "vm": {
            "uuid": uuid(vmi),
            "name": meta.name,
            "namespace": meta.namespace,
            "project": { "id": meta.namespace, "number": number, "account": format!("{number:012}") },
        },
        "hostname": { "short": hostname(vmi) },
        "placement": { "region": options.region, "zone": options.zone },
        "network": network(nics, found.network),
        "metadata": found.metadata,
        "credentials": { "service_account": account(vmi, with_token) },
    });
    if options.instance_id == InstanceId::NamespaceName {
        document["vm"]["instance_id"] = joined(&meta.namespace, &meta.name).into();
    }
    let mut add = |key: &str, value: Value| document[key] = value;
    if let Some(kind) = INSTANCE_TYPES.iter().find_map(|name| vmi.annotation(name)) {
        add("instance_type", kind.into());
    }
    if let Some(arch) = spec.architecture.as_deref().filter(|arch| !arch.is_empty()) {
        add("arch", kernel_name(arch).into());
    }
    // Names are positions, as in KubeVirt.
    let keys = found.keys.into_iter().enumerate();
    add("ssh_keys", keys.map(|(n, key)| json!({ "name": n.to_string(), "key": key })).collect());
    document
}

/// The firmware's UUID. If KubeVirt chooses it at random, it is unknown here, and the VMI's own UID replaces it.
fn uuid(vmi: &Vmi) -> &str {
    vmi.spec.domain.firmware.uuid.as_deref().filter(|uuid| !uuid.is_empty()).unwrap_or(&vmi.metadata.uid)
}

/// KubeVirt's host name (SanitizeHostname): that of the VMI, or else the first label of its name, cut to the limit. It
/// drops a trailing hyphen after the cut, because host names cannot end with one.
fn hostname(vmi: &Vmi) -> &str {
    let given = vmi.spec.hostname.as_deref().filter(|name| !name.is_empty());
    let label = vmi.metadata.name.split('.').next().unwrap_or_default();
    given.unwrap_or_else(|| label.get(..HOSTNAME_OCTETS).unwrap_or(label).trim_end_matches('-'))
}

/// Namespace and name as one text, different for every two VMs: by a hyphen, as in kubevirt-imds, where the first hyphen
/// is the one between them, and by a slash in a namespace with hyphens. Neither a namespace nor a name has a slash.
fn joined(namespace: &str, name: &str) -> String {
    let between = if namespace.contains('-') { '/' } else { '-' };
    format!("{namespace}{between}{name}")
}

/// The kernel's name (`uname -m`) of an architecture in Go's spelling.
fn kernel_name(arch: &str) -> &str {
    match arch {
        "amd64" => "x86_64",
        "arm64" => "aarch64",
        other => other,
    }
}

fn network(nics: &[Served], given: Option<Network>) -> Value {
    let nic = |nic: &Served| {
        json!({
            "id": nic.name,
            "mac": nic.mac.to_string(),
            "addresses": [{ "method": "dhcp4" }],
            "port": { "ifname": nic.port.ifname, "netns": nic.port.netns },
        })
    };
    // Without a network document the guest uses DHCP on its first NIC, as on KubeVirt.
    let mode = if given.is_some() { "raw" } else { "none" };
    let (raw, data) = match given {
        Some(Network::Config(text)) => (Some(text), None),
        Some(Network::Data(text)) => (None, Some(text)),
        None => (None, None),
    };
    json!({ "mode": mode, "raw": raw, "network_data": data, "nics": nics.iter().map(nic).collect::<Vec<_>>() })
}

/// The VMI's service account, with a source for its token if one exists.
fn account(vmi: &Vmi, with_token: bool) -> Value {
    let volumes = vmi.spec.volumes.iter().filter_map(|volume| volume.service_account.as_ref());
    let volumes = volumes.map(|account| account.service_account_name.as_str());
    let named = vmi.spec.service_account_name.as_deref().into_iter().chain(volumes);
    let name = named.filter(|name| !name.is_empty()).chain([DEFAULT_ACCOUNT]).next();
    let mut account = json!({ "name": name });
    if with_token {
        account["token"] = json!({ "source": { "file": "token" } });
    }
    account
}
