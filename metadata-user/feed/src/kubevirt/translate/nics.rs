//! A VMI's NICs: which can be served, on which tap, with which MAC.

use metadata_common::mac::Mac;

use super::Problem;
use super::names::{Names, names};
use crate::kubevirt::vmi::{Binding, Interface, Vmi, station_mac};
use crate::kubevirt::{Options, Passt};
use crate::pods::{Pod, TapKind};
use metadata_base::port::PortName;
use metadata_links::inlet;

/// A NIC that can be served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Served {
    pub(super) name: String,
    pub(super) port: PortName,
    pub(super) mac: Mac,
}

/// The result for all NICs of a VMI.
pub(super) struct Nics {
    /// The NICs that can be served now, in the order of the VMI.
    pub(super) served: Vec<Served>,
    /// The guest's MAC, if the pod needs an inlet.
    pub(super) inlet: Option<Mac>,
}

/// Finds the NICs that can be served, and notes a problem for each other one.
pub(super) fn nics(vmi: &Vmi, pod: &Pod, options: &Options, problems: &mut Vec<Problem>) -> Nics {
    let devices = &vmi.spec.domain.devices;
    let implied = [Interface::implied()];
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
    nic: &Interface,
    pod: &Pod,
    options: &Options,
    inlet: &mut Option<Mac>,
) -> Result<Served, Problem> {
    let name = || nic.name.clone();
    let names = names(vmi, &nic.name);
    let plugin = match nic.binding() {
        Binding::Passt(_) if options.passt == Passt::Listen => return by_passt(vmi, nic, &names, pod, inlet),
        Binding::Passt(binding) => {
            return Err(Problem::Passt { nic: name(), binding: binding.to_owned() });
        }
        Binding::Tapless(binding) => {
            return Err(Problem::Binding { nic: name(), binding: binding.to_owned() });
        }
        Binding::Plugin(plugin) => Some(plugin),
        Binding::Masquerade | Binding::Bridge => None,
    };
    let find =
        |names: &[String]| names.iter().find_map(|name| pod.taps.iter().find(|tap| tap.ifname == *name));
    // If a plugin makes no device of the tap's name, KubeVirt uses the pod's NIC (TapLibvirtSpecGenerator).
    let there = find(&names.taps).or_else(|| plugin.and_then(|_| find(&names.pod_nics)));
    let ifname = match (there, plugin) {
        (Some(tap), _) if tap.kind == TapKind::Tap => tap.ifname.clone(),
        (Some(device), _) => return Err(Problem::NoTap { nic: name(), device: device.ifname.clone() }),
        (None, Some(plugin)) if is_passt(plugin, options) => return by_passt(vmi, nic, &names, pod, inlet),
        // The name of a plugin's device is known once the device exists; that of KubeVirt's own tap is known before.
        (None, Some(plugin)) => {
            return Err(Problem::PluginTap { nic: name(), plugin: plugin.to_owned(), taps: names.taps });
        }
        (None, None) => names.taps.first().cloned().unwrap_or_default(),
    };
    let mac = mac(vmi, nic, &names, pod)?;
    Ok(Served { name: name(), port: PortName { ifname, netns: Some(pod.netns.clone()) }, mac })
}

/// True for a plugin that runs passt, as KubeVirt's own binding does.
fn is_passt(plugin: &str, options: &Options) -> bool {
    options.passt == Passt::Listen && options.passt_plugins.iter().any(|name| name == plugin)
}

/// A NIC on passt has no device; the pod's inlet serves it. An inlet sends from one MAC, that of the first NIC. Several
/// such NICs share the pod, and so are one identity.
fn by_passt(
    vmi: &Vmi,
    nic: &Interface,
    names: &Names,
    pod: &Pod,
    wanted: &mut Option<Mac>,
) -> Result<Served, Problem> {
    let mac = mac(vmi, nic, names, pod)?;
    wanted.get_or_insert(mac);
    if !pod.has_inlet() {
        return Err(Problem::Inlet { nic: nic.name.clone() });
    }
    let port = PortName { ifname: inlet::PORT.into(), netns: Some(pod.netns.clone()) };
    Ok(Served { name: nic.name.clone(), port, mac })
}

/// The MAC the guest sends from: that of the VMI's NIC, that of the domain, or that of the pod's NIC.
///
/// A NIC without `macAddress` has the MAC of the pod's NIC where the VM started, and keeps it through live migrations,
/// while each pod's NIC has its own. Only the status has it then, and on the first node as soon as the domain runs. In a
/// bridged pod a dummy device replaces the moved NIC and keeps its name and MAC.
fn mac(vmi: &Vmi, nic: &Interface, names: &Names, pod: &Pod) -> Result<Mac, Problem> {
    if let Some(text) = nic.mac_address.as_deref().filter(|text| !text.is_empty()) {
        return station_mac(text).ok_or_else(|| Problem::BadMac { nic: nic.name.clone() });
    }
    let mut of_nic_in_status =
        vmi.status.interfaces.iter().filter(|there| there.name.as_ref() == Some(&nic.name));
    let in_domain = of_nic_in_status.find_map(|there| there.mac);
    let of_nic = |name: &String| pod.nics.iter().find(|nic| nic.name == *name).map(|nic| nic.mac);
    let of_tap = |name: &String| pod.taps.iter().find(|tap| tap.ifname == *name).map(|tap| tap.mac);
    let in_pod = || names.pod_nics.iter().find_map(|name| of_nic(name).or_else(|| of_tap(name)));
    let mac = in_domain.or_else(in_pod);
    mac.ok_or_else(|| Problem::NoMac { nic: nic.name.clone(), pod_nics: names.pod_nics.clone() })
}
