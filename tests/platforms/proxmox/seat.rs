//! Where guests boot, one after the other: a namespace with a NIC that becomes each VM's.

use super::fleet::Vm;
use anyhow::Result;
use serde_json::json;
use std::sync::Arc;
use support::cloudinit::{CloudInit, Crawl, Crawler, Machine};
use support::guest::{METADATA, NIC};
use support::host;
use support::netns::Namespace;
use support::pump::{Pump, Wire};
use support::tap::{Shape, Tap};

/// The longest time in which a seat's guests boot, in seconds.
const LIMIT: u32 = 900;
/// A NIC that no VM's tap stands for: all guests ask on their first one.
const SECOND: &str = "eth1";
/// What the firmware shows: the seed of NoCloud, and OpenStack's product.
const SEED: &str = "ds=nocloud;dsmode=net;s=http://169.254.169.254/v1/";
const PRODUCT: &str = "OpenStack Nova";

/// A namespace and its NIC. Closing a tap takes a grace period of the kernel, so guests share it.
pub(super) struct Seat<'a> {
    // Dropped before the namespace.
    crawler: Crawler<'a>,
    nic: Arc<Tap>,
    second: Tap,
    ns: Namespace,
}

impl<'a> Seat<'a> {
    pub(super) fn new(cloud_init: &'a CloudInit) -> Result<Self> {
        let ns = Namespace::new("guest")?;
        ns.sysctl("ipv6/conf/default/disable_ipv6", "1")?;
        // cloud-init looks for every NIC that the network configuration names.
        let second = Tap::create(&ns, SECOND, Shape::default())?;
        let nic = Arc::new(Tap::create(&ns, NIC, Shape::virtio())?);
        Ok(Self { crawler: cloud_init.crawler(&ns, LIMIT)?, nic, second, ns })
    }

    /// Lets a VM's cloud-init find its metadata: OpenStack's before it has an address, then NoCloud's with one.
    pub(super) fn boot(&mut self, vm: &Vm, tap: Arc<Tap>) -> Result<[Crawl; 2]> {
        self.ns.ip_batch(&format!("link set {NIC} down\naddr flush dev {NIC}\n"))?;
        self.second.set_mac(vm.mac(1))?;
        self.nic.set_mac(vm.identity.mac)?;
        self.ns.ip(&format!("link set {NIC} up"))?;
        let _pump = Pump::start(vec![Wire::new(Arc::clone(&self.nic), tap)])?;
        let openstack = self.crawler.crawl("OpenStackLocal", &machine(vm, "system-product-name", PRODUCT))?;
        self.ns.ip_batch(&format!(
            "link set {NIC} up\naddr replace {}/16 dev {NIC}\nroute replace default via {}\n\
             route replace {METADATA} dev {NIC} scope link\n",
            vm.identity.address,
            host::ADDRESS
        ))?;
        let nocloud = self.crawler.crawl("NoCloudNet", &machine(vm, "system-serial-number", SEED))?;
        Ok([openstack, nocloud])
    }
}

fn machine(vm: &Vm, name: &'static str, value: &str) -> Machine {
    let uuid = ("system-uuid", vm.identity.instance_id.clone());
    let on_link = format!("32,169,254,169,254,0,0,0,0,0,{}", host::ADDRESS.to_string().replace('.', ","));
    let routes = ("rfc3442-classless-static-routes", on_link);
    Machine {
        dmi: [(name, value.to_owned()), uuid].into(),
        // Without a label NoCloud's class does not search disks for a seed.
        config: json!({"datasource": {"NoCloud": {"fs_label": null}}, "datasource_list": []}),
        lease: vm.lease().into_iter().chain([routes]).collect(),
        ..Machine::default()
    }
}
