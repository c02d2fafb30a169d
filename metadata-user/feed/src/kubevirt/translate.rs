//! Translates a VMI and its pod into a record. This module reads only through its arguments.

mod data;
pub(super) mod events;

#[cfg(test)]
mod tests;

pub use data::{METADATA_CHARS, METADATA_KEYS};

use bytes::Bytes;
use data::{Data, DataSources, NetworkDocument, data};
use metadata_common::mac::Mac;
use metadata_common::port::PortName;
use metadata_content::record::{Credential, Record, RecordLimits, USER_DATA_MAX};
use metadata_links::inlet;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::{ENABLED, INSTANCE_TYPES, InstanceId};
use crate::kubevirt::vmi::{NicBinding, Vmi, VmiInterface, station_mac};
use crate::kubevirt::{KubevirtOptions, Passt};
use crate::memory_budget::MemoryExhausted;
use crate::pods::{Pod, TapKind, names_of};

/// The files of one volume, by name.
pub type VolumeFiles = BTreeMap<String, Bytes>;

/// The volumes of one pod, as a translation reads them.
pub trait PodVolumes {
    /// The files of a volume; `None` if it does not exist yet.
    ///
    /// # Errors
    /// The reason, which must not repeat any content.
    fn files(&self, volume: &str) -> Result<Option<VolumeFiles>, String>;

    /// The public keys of a volume that holds the Secret of an access credential; `None` if it does not exist yet.
    ///
    /// # Errors
    /// Like [`files`](Self::files).
    fn public_keys(&self, volume: &str) -> Result<Option<Arc<PublicKeys>>, String> {
        Ok(self.files(volume)?.map(|files| Arc::new(PublicKeys::parse(&files))))
    }
}

impl<F: Fn(&str) -> Result<Option<VolumeFiles>, String>> PodVolumes for F {
    fn files(&self, volume: &str) -> Result<Option<VolumeFiles>, String> {
        self(volume)
    }
}

/// The service account of a pod that names none.
const DEFAULT_ACCOUNT: &str = "default";
/// Longest host name in bytes (RFC 1123 §2.1); KubeVirt cuts at the same length.
const HOSTNAME_BYTES: usize = 63;

/// The result of a translation.
#[derive(Clone, Debug, PartialEq)]
pub struct VmiTranslation {
    /// What to publish.
    pub outcome: TranslationOutcome,
    /// The parts that cannot be served, or not yet.
    pub problems: Vec<VmiProblem>,
    /// The source MAC of the inlet that the pod needs, if it needs one.
    pub inlet: Option<Mac>,
}

/// What to publish for a VMI.
#[derive(Clone, Debug, PartialEq)]
pub enum TranslationOutcome {
    /// The complete record, with generation 0: the caller knows the last generation.
    Record(Box<Record>),
    /// The identities are known, but their data is not complete yet.
    Expect(Vec<(PortName, Mac)>),
    /// No NIC can be served.
    Unserved,
}

/// True if the options and the VMI's annotations ask for service.
#[must_use]
pub fn is_wanted(vmi: &Vmi, options: &KubevirtOptions) -> bool {
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
    options: &KubevirtOptions,
    limits: &RecordLimits,
) -> VmiTranslation {
    let mut problems = Vec::new();
    let Nics { served: nics, inlet } = nics(vmi, pod, options, &mut problems);
    if nics.is_empty() {
        return VmiTranslation { outcome: TranslationOutcome::Unserved, problems: first_of(problems), inlet };
    }
    let found = data(&DataSources { vmi, read, options }, &mut problems);
    let record = if problems.iter().any(VmiProblem::withholds) {
        None
    } else {
        match record(vmi, &nics, found, options, limits, &mut problems) {
            Ok(record) => Some(record),
            Err(reason) => {
                problems.push(VmiProblem::Record(reason));
                None
            }
        }
    };
    let outcome = match record {
        Some(record) => TranslationOutcome::Record(Box::new(record)),
        None => TranslationOutcome::Expect(nics.into_iter().map(|nic| (nic.port, nic.mac)).collect()),
    };
    VmiTranslation { outcome, problems: first_of(problems), inlet }
}

/// Assembles the record. It goes through the parser of record files, so that the same rules apply.
fn record(
    vmi: &Vmi,
    nics: &[ServableNic],
    mut found: Data,
    options: &KubevirtOptions,
    limits: &RecordLimits,
    problems: &mut Vec<VmiProblem>,
) -> Result<Record, String> {
    let (user, vendor, token) = (found.user.take(), found.vendor.take(), found.token.take());
    let document = document(vmi, nics, found, options, token.is_some());
    let (mut record, _) =
        Record::parse_within(limits, "vmi.json", &document.to_string()).map_err(|error| error.to_string())?;
    // Never by what the VMI says of itself.
    record.vm.owner = Some(vmi.owner());
    (record.user_data, record.vendor_data) = (user.map(Into::into), vendor.map(Into::into));
    record.events = events::of(vmi);
    record.serve = options.serve.clone();
    // A Secret may be as large as this limit, and KubeVirt accepts it whole.
    record.serve.limits.user_data = USER_DATA_MAX;
    if let Some(token) = token
        && record.credentials.resolve(Credential::ServiceAccount, &token).is_err()
    {
        problems.push(VmiProblem::Token);
        if let Some(account) = &mut record.credentials.service_account {
            account.token = None;
        }
    }
    Ok(record)
}

/// The record as a document, without payloads.
fn document(
    vmi: &Vmi,
    nics: &[ServableNic],
    found: Data,
    options: &KubevirtOptions,
    with_token: bool,
) -> Value {
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
    given.unwrap_or_else(|| label.get(..HOSTNAME_BYTES).unwrap_or(label).trim_end_matches('-'))
}

/// Namespace and name as one text, different for every two VMs: by a hyphen, as in kubevirt-imds, where the first
/// hyphen is the one between them, and by a slash in a namespace with hyphens. Neither a namespace nor a name has a
/// slash.
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

fn network(nics: &[ServableNic], given: Option<NetworkDocument>) -> Value {
    let nic = |nic: &ServableNic| {
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
        Some(NetworkDocument::Config(text)) => (Some(text), None),
        Some(NetworkDocument::Data(text)) => (None, Some(text)),
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

// The public keys in the Secret of an access credential.
//
// The author of a VMI also writes its Secrets. A Secret of short lines would become hundreds of thousands of keys, each
// with its own allocation, so parsing stops at the first key beyond a limit.

/// Most public keys of one Secret.
pub const KEYS_PER_SECRET: usize = 256;
/// Most bytes of one public key. OpenSSH's longest, an RSA key of 16,384 bits, has 2.8 KiB; a certificate has more.
pub const KEY_BYTES: usize = 16 << 10;
/// Most public keys of one VM.
pub const KEYS_PER_VM: usize = 1_024;
/// Most bytes of all public keys of one VM.
pub const KEY_BYTES_PER_VM: usize = 512 << 10;

/// Why public keys are refused.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum PublicKeyError {
    /// A Secret has too many keys.
    #[error("expected at most {KEYS_PER_SECRET} public keys, one a line, found more")]
    TooMany,
    /// A key is too long.
    #[error("expected public keys of at most {KEY_BYTES} bytes, found a longer line")]
    TooLong,
    /// All Secrets of the VM together have too many keys.
    #[error("expected at most {KEYS_PER_VM} public keys of one VM, found more")]
    TooManyOfVm,
    /// All keys of the VM together are too long.
    #[error("expected at most {KEY_BYTES_PER_VM} bytes of public keys of one VM, found more")]
    TooLongOfVm,
}

/// The public keys of one Secret.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PublicKeys {
    /// The keys, in the order of files and lines; none if a limit is exceeded.
    keys: Vec<String>,
    /// The files that are no text.
    other_files: Vec<String>,
    /// The limit that is exceeded.
    error: Option<PublicKeyError>,
}

impl PublicKeys {
    /// Parses the files of a Secret, one key a line. Empty lines, comments and kubelet's own files are skipped.
    #[must_use]
    pub fn parse(files: &VolumeFiles) -> Self {
        let mut found = Self::default();
        for (file, bytes) in files.iter().filter(|(file, _)| !file.starts_with("..")) {
            let Ok(text) = std::str::from_utf8(bytes) else {
                found.other_files.push(file.clone());
                continue;
            };
            if let Err(error) = found.add(text) {
                return Self { keys: Vec::new(), error: Some(error), ..found };
            }
        }
        found
    }

    fn add(&mut self, text: &str) -> Result<(), PublicKeyError> {
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
            if self.keys.len() == KEYS_PER_SECRET {
                return Err(PublicKeyError::TooMany);
            }
            if line.len() > KEY_BYTES {
                return Err(PublicKeyError::TooLong);
            }
            self.keys.push(line.to_owned());
        }
        Ok(())
    }

    /// Bytes of all keys, with what each takes beside its text.
    #[must_use]
    pub fn weight(&self) -> usize {
        self.keys.iter().chain(&self.other_files).map(|text| text.len() + size_of::<String>()).sum()
    }
}

// A VMI's NICs: which can be served, on which tap, with which MAC.

/// A NIC that can be served.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ServableNic {
    name: String,
    port: PortName,
    mac: Mac,
}

/// The result for all NICs of a VMI.
struct Nics {
    /// The NICs that can be served now, in the order of the VMI.
    served: Vec<ServableNic>,
    /// The guest's MAC, if the pod needs an inlet.
    inlet: Option<Mac>,
}

/// Finds the NICs that can be served, and notes a problem for each other one.
fn nics(vmi: &Vmi, pod: &Pod, options: &KubevirtOptions, problems: &mut Vec<VmiProblem>) -> Nics {
    let devices = &vmi.spec.domain.devices;
    let implied = [VmiInterface::implied()];
    let none = devices.interfaces.is_empty() && devices.autoattach_pod_interface != Some(false);
    let interfaces = if none { &implied[..] } else { &devices.interfaces };
    let there = interfaces.iter().filter(|nic| nic.state.as_deref() != Some("absent"));
    let mut nics = Nics { served: Vec::new(), inlet: None };
    for nic in there {
        match serve(vmi, nic, pod, options, &mut nics.inlet) {
            Ok(nic) => nics.served.push(nic),
            Err(problem) => problems.push(problem),
        }
    }
    nics
}

fn serve(
    vmi: &Vmi,
    nic: &VmiInterface,
    pod: &Pod,
    options: &KubevirtOptions,
    inlet: &mut Option<Mac>,
) -> Result<ServableNic, VmiProblem> {
    let name = || nic.name.clone();
    let names = names(vmi, &nic.name);
    let plugin = match nic.binding() {
        NicBinding::Passt(_) if options.passt == Passt::Listen => {
            return by_passt(vmi, nic, &names, pod, inlet);
        }
        NicBinding::Passt(binding) => {
            return Err(VmiProblem::Passt { nic: name(), binding: binding.to_owned() });
        }
        NicBinding::Tapless(binding) => {
            return Err(VmiProblem::Binding { nic: name(), binding: binding.to_owned() });
        }
        NicBinding::Plugin(plugin) => Some(plugin),
        NicBinding::Masquerade | NicBinding::Bridge => None,
    };
    let find =
        |names: &[String]| names.iter().find_map(|name| pod.taps.iter().find(|tap| tap.ifname == *name));
    // If a plugin makes no device of the tap's name, KubeVirt uses the pod's NIC (TapLibvirtSpecGenerator).
    let there = find(&names.taps).or_else(|| plugin.and_then(|_| find(&names.pod_nics)));
    let ifname = match (there, plugin) {
        (Some(tap), _) if tap.kind == TapKind::Tap => tap.ifname.clone(),
        (Some(device), _) => return Err(VmiProblem::NoTap { nic: name(), device: device.ifname.clone() }),
        (None, Some(plugin)) if is_passt(plugin, options) => return by_passt(vmi, nic, &names, pod, inlet),
        // The name of a plugin's device is known once the device exists; that of KubeVirt's own tap is known before.
        (None, Some(plugin)) => {
            return Err(VmiProblem::PluginTap { nic: name(), plugin: plugin.to_owned(), taps: names.taps });
        }
        (None, None) => names.taps.first().cloned().unwrap_or_default(),
    };
    let mac = mac(vmi, nic, &names, pod)?;
    Ok(ServableNic { name: name(), port: PortName { ifname, netns: Some(pod.netns.clone()) }, mac })
}

/// True for a plugin that runs passt, as KubeVirt's own binding does.
fn is_passt(plugin: &str, options: &KubevirtOptions) -> bool {
    options.passt == Passt::Listen && options.passt_plugins.iter().any(|name| name == plugin)
}

/// A NIC on passt has no device; the pod's inlet serves it. An inlet sends from one MAC, that of the first NIC. Several
/// such NICs share the pod, and so are one identity.
fn by_passt(
    vmi: &Vmi,
    nic: &VmiInterface,
    names: &Names,
    pod: &Pod,
    wanted: &mut Option<Mac>,
) -> Result<ServableNic, VmiProblem> {
    let mac = mac(vmi, nic, names, pod)?;
    wanted.get_or_insert(mac);
    if !pod.has_inlet() {
        return Err(VmiProblem::Inlet { nic: nic.name.clone() });
    }
    let port = PortName { ifname: inlet::PORT.into(), netns: Some(pod.netns.clone()) };
    Ok(ServableNic { name: nic.name.clone(), port, mac })
}

/// The MAC the guest sends from: that of the VMI's NIC, that of the domain, or that of the pod's NIC.
///
/// A NIC without `macAddress` has the MAC of the pod's NIC where the VM started, and keeps it through live migrations,
/// while each pod's NIC has its own. Only the status has it then, and on the first node as soon as the domain runs. In
/// a bridged pod a dummy device replaces the moved NIC and keeps its name and MAC.
fn mac(vmi: &Vmi, nic: &VmiInterface, names: &Names, pod: &Pod) -> Result<Mac, VmiProblem> {
    if let Some(text) = nic.mac_address.as_deref().filter(|text| !text.is_empty()) {
        return station_mac(text).ok_or_else(|| VmiProblem::BadMac { nic: nic.name.clone() });
    }
    let mut of_nic_in_status =
        vmi.status.interfaces.iter().filter(|there| there.name.as_ref() == Some(&nic.name));
    let in_domain = of_nic_in_status.find_map(|there| there.mac);
    let of_nic = |name: &String| pod.nics.iter().find(|nic| nic.name == *name).map(|nic| nic.mac);
    let of_tap = |name: &String| pod.taps.iter().find(|tap| tap.ifname == *name).map(|tap| tap.mac);
    let in_pod = || names.pod_nics.iter().find_map(|name| of_nic(name).or_else(|| of_tap(name)));
    let mac = in_domain.or_else(in_pod);
    mac.ok_or_else(|| VmiProblem::NoMac { nic: nic.name.clone(), pod_nics: names.pod_nics.clone() })
}

// The possible names of a NIC's devices in its pod.

/// The possible names of a NIC's devices, the most likely first.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Names {
    /// Its tap.
    taps: Vec<String>,
    /// The pod's NIC, from which the guest takes its MAC if the VMI gives none.
    pod_nics: Vec<String>,
}

/// Returns the device names of the NIC on a network of the VMI.
///
/// KubeVirt before 0.59 numbers secondary networks; later versions hash the network's name. Each name stays for the
/// life of the VM, through migrations too. Only the VMI's status shows which scheme applies, and it arrives late.
fn names(vmi: &Vmi, network: &str) -> Names {
    let told = vmi.status.interfaces.iter().find(|there| there.name.as_deref() == Some(network));
    let told = told.and_then(|there| there.pod_interface_name.clone()).filter(|name| !name.is_empty());
    let mut secondary = vmi.spec.networks.iter().filter(|network| network.is_secondary());
    let at = secondary.position(|there| there.name == network);
    let usual = names_of(network, at.map(|at| at + 1));
    // The primary tap's name is fixed; the others derive from the pod NIC's name.
    let by_status = told.as_deref().filter(|_| at.is_some()).and_then(|nic| nic.get(3..));
    let by_status = by_status.map(|rest| format!("tap{rest}"));
    Names {
        taps: distinct(by_status.into_iter().chain(usual.iter().map(|names| names.tap.clone()))),
        pod_nics: distinct(told.into_iter().chain(usual.into_iter().map(|names| names.pod))),
    }
}

/// Removes duplicates: the names from the status usually equal the derived ones.
fn distinct(names: impl Iterator<Item = String>) -> Vec<String> {
    let mut seen = BTreeSet::new();
    names.filter(|name| seen.insert(name.clone())).collect()
}

// The reasons why a VM, or a part of it, is not served.

/// Most problems of a VM that are named; the author of a VMI chooses how many it has.
pub const MAX_PROBLEMS: usize = 16;

/// A problem, with a message for the VM's owner. No message repeats the content of a Secret or of user-data.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum VmiProblem {
    /// The pod's launcher is not found, so the VM's taps are unknown.
    #[error("the launcher of pod `{pod}` is not found yet; the agent keeps looking: {reason}")]
    Launcher {
        /// The pod's UID.
        pod: String,
        /// Why the last search failed.
        reason: String,
    },
    /// A limit keeps the agent from watching this pod or one of its volumes.
    #[error("pod `{pod}`: {reason}")]
    Unfollowed {
        /// The pod's UID.
        pod: String,
        /// Which limit is reached.
        reason: String,
    },
    /// The NIC's binding has no tap.
    #[error(
        "NIC `{nic}`: binding `{binding}` is not served because it has no tap; use masquerade, bridge or a plugin with \
         a tap for the NIC that asks for metadata"
    )]
    Binding {
        /// The NIC.
        nic: String,
        /// The binding's name in the VMI.
        binding: String,
    },
    /// The NIC is on passt, and the options do not serve passt.
    #[error(
        "NIC `{nic}`: binding `{binding}` is not served because it has no tap; use masquerade, bridge or a plugin with \
         a tap for the NIC that asks for metadata, or have the agent serve the pod's own \
         sockets with `kubevirt: {{passt: listen}}`"
    )]
    Passt {
        /// The NIC.
        nic: String,
        /// The binding's name in the VMI.
        binding: String,
    },
    /// The inlet for the NIC on passt does not exist yet.
    #[error(
        "NIC `{nic}`: the agent cannot accept passt's connections in its pod yet; \
         if this persists, the agent's log has the reason"
    )]
    Inlet {
        /// The NIC.
        nic: String,
    },
    /// The plugin's device is not a tap.
    #[error(
        "NIC `{nic}`: expected a tap, found `{device}` of another kind: no XDP program sees its guest's frames"
    )]
    NoTap {
        /// The NIC.
        nic: String,
        /// The device.
        device: String,
    },
    /// The plugin's tap does not exist yet, and may never exist.
    #[error("NIC `{nic}`: expected a tap `{}` of binding plugin `{plugin}`, found none yet", taps.join("` or `"))]
    PluginTap {
        /// The NIC.
        nic: String,
        /// The plugin.
        plugin: String,
        /// The possible names of the tap.
        taps: Vec<String>,
    },
    /// The NIC's MAC is not known yet.
    #[error("NIC `{nic}`: no `macAddress`, and expected a NIC `{}` in the pod to take it from, found none yet", pod_nics.join("` or `"))]
    NoMac {
        /// The NIC.
        nic: String,
        /// The possible names of the pod's NIC.
        pod_nics: Vec<String>,
    },
    /// The NIC's `macAddress` is not a unicast MAC.
    #[error("NIC `{nic}`: `macAddress` is not the MAC address of one station")]
    BadMac {
        /// The NIC.
        nic: String,
    },
    /// A volume of the pod does not exist yet.
    #[error("{field}: volume `{volume}` of the pod does not exist yet")]
    Volume {
        /// The field it is for.
        field: &'static str,
        /// Its name.
        volume: String,
    },
    /// A volume of the pod cannot be read.
    #[error("{field}: volume `{volume}` of the pod cannot be read: {reason}")]
    Unreadable {
        /// The field it is for.
        field: &'static str,
        /// Its name.
        volume: String,
        /// The reason.
        reason: String,
    },
    /// A Secret or ConfigMap lacks the expected key.
    #[error("{field}: expected a key {keys} in volume `{volume}`, found none of them")]
    Key {
        /// The field it is for.
        field: &'static str,
        /// The volume.
        volume: String,
        /// The keys that would serve.
        keys: &'static str,
    },
    /// A field is not base64.
    #[error("{field}: expected standard base64, found something else")]
    Base64 {
        /// The field.
        field: &'static str,
    },
    /// A payload exceeds its limit.
    #[error("{field}: expected at most {limit} bytes, found {found}")]
    TooLarge {
        /// The field.
        field: &'static str,
        /// The limit in bytes.
        limit: usize,
        /// The payload's length in bytes.
        found: usize,
    },
    /// The network data is in no known form.
    #[error(
        "networkData: expected cloud-init's network-config, version 1 or 2, or OpenStack's network_data.json with links and \
         networks; found another form, which the VM reads from its disk only"
    )]
    NetworkForm,
    /// A custom metadata key that is omitted.
    #[error("metaData: key `{key}` is omitted: {reason}")]
    Metadata {
        /// The key.
        key: String,
        /// The reason.
        reason: &'static str,
    },
    /// A key of a Secret that is not a public key.
    #[error("accessCredentials: `{file}` of Secret `{secret}` is omitted: expected public keys, one a line")]
    PublicKey {
        /// The Secret.
        secret: String,
        /// The key in the Secret.
        file: String,
    },
    /// The public keys of a Secret, or of all of the VM's Secrets, exceed a limit.
    #[error(
        "accessCredentials: Secret `{secret}`: {reason}; put fewer keys into it, or user-data that fetches them"
    )]
    PublicKeys {
        /// The Secret, the first of those that are too much.
        secret: String,
        /// Which limit is exceeded.
        reason: PublicKeyError,
    },
    /// A VM has more access credentials than a pod may have volumes.
    #[error(
        "accessCredentials: expected at most {limit} Secrets of public keys, found {found}; join some of them"
    )]
    Credentials {
        /// The limit.
        limit: usize,
        /// The number of Secrets.
        found: usize,
    },
    /// Problems beyond the limit of those that are named.
    #[error("and {0} more problems; solve the ones above first")]
    More(usize),
    /// The service account's token is not a JWT with an expiry.
    #[error("token: expected a JWT with an expiry, found something else")]
    Token,
    /// The list of VMIs that an earlier release kept lacks what names the VM's owner.
    #[error("the VM's owner is not known until the API server answers: an earlier release did not keep it")]
    Owner,
    /// The record exceeds the memory for records.
    #[error("{0}")]
    Room(MemoryExhausted),
    /// The record parser refuses the result.
    #[error("{0}")]
    Record(String),
}

impl VmiProblem {
    /// True for a problem that withholds the whole VM until it is solved. A guest that boots with half of its data
    /// never asks for the rest.
    #[must_use]
    pub fn withholds(&self) -> bool {
        matches!(
            self,
            Self::Volume { .. }
                | Self::Unreadable { .. }
                | Self::Key { .. }
                | Self::Base64 { .. }
                | Self::TooLarge { .. }
                | Self::Owner
                | Self::PublicKeys { .. }
                | Self::Credentials { .. }
                | Self::Room(_)
                | Self::Record(_)
        )
    }

    /// True for a problem that may pass by itself in the first moments of a pod.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        matches!(
            self,
            Self::Volume { .. }
                | Self::Key { .. }
                | Self::NoMac { .. }
                | Self::PluginTap { .. }
                | Self::Inlet { .. }
                | Self::Launcher { .. }
                | Self::Owner
        )
    }
}

/// The first problems, and how many more there are. Those that withhold the VM come first, so that none of them is
/// lost.
fn first_of(mut problems: Vec<VmiProblem>) -> Vec<VmiProblem> {
    if problems.len() > MAX_PROBLEMS {
        problems.sort_by_key(|problem| !problem.withholds());
        let more = problems.len() - MAX_PROBLEMS;
        problems.truncate(MAX_PROBLEMS);
        problems.push(VmiProblem::More(more));
    }
    problems
}
