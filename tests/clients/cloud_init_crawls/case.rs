//! Runs one datasource, on the machine it expects, against every form of the record.

use super::form::{EC2_ID, Form, GZIP, NUMBER, USER, VENDOR_DATA};
use anyhow::Result;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::net::Ipv4Addr;
use support::agent::{Agent, PortArgument};
use support::cloudinit::{CloudInit, Crawl, Machine, Release};
use support::guest::{Guest, NIC, Route, Spec};
use support::host::{self, Host};
use support::record::{Identity, replace};

/// Maximum number of crawls of one form if [`Case::again_after`] applies.
const MAX_CRAWLS: usize = 20;

/// When in the boot the datasource runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Before the network is up: the datasource configures it by DHCP or with a link-local address.
    Local,
    /// When the network is up.
    Network,
}

/// What a datasource does with vendor-data.
#[derive(Clone, Copy, Debug)]
pub(super) enum VendorData {
    /// The dialect has no vendor-data.
    Unknown,
    Taken,
    /// Only the newer cloud-init requests it; the distribution's does not.
    TakenByNewer,
}

/// A value in the firmware tables, or an instance id.
#[derive(Clone, Copy, Debug)]
pub(super) enum Word {
    Text(&'static str),
    Number,
    Ec2,
    Uuid,
    /// Oracle's long form of the UUID.
    Ocid,
}

/// Known deviations of a cloud-init too old for a feature.
pub(super) struct TooNew {
    pub(super) forms: &'static [Form],
    /// The beginning of each deviation expected in these forms.
    pub(super) deviations: &'static [&'static str],
    pub(super) why: &'static str,
}

impl TooNew {
    /// Removes the known deviations, and adds one for each known deviation that no longer occurs.
    fn forgive(&self, form: Form, wrong: &mut Vec<String>) {
        for known in self.deviations.iter().filter(|_| self.forms.contains(&form)) {
            let before = wrong.len();
            wrong.retain(|deviation| !deviation.starts_with(known));
            if wrong.len() == before {
                wrong.push(format!("{known:?} no longer occurs, though {}", self.why));
            }
        }
    }
}

/// A datasource and the expected result of its crawl.
pub(super) struct Case {
    /// Class name without the prefix `DataSource`.
    pub(super) class: &'static str,
    /// Releases of cloud-init whose class is run.
    pub(super) releases: &'static [Release],
    pub(super) stage: Stage,
    /// Firmware (DMI) values of the machine.
    pub(super) dmi: &'static [(&'static str, Word)],
    /// Files of the image below cloud-init's own directory.
    pub(super) files: &'static [(&'static str, &'static str)],
    /// The member `datasource` of cloud-init's configuration.
    pub(super) config: Value,
    /// First group of the VM's UUID.
    pub(super) uuid: &'static str,
    /// The DHCP server's identifier (option 54) in the lease. Only CloudStack's class asks the service there, which a
    /// network must arrange; every other class must do with a network that knows nothing of the service.
    pub(super) dhcp_server: Ipv4Addr,
    /// Whether the lease routes 169.254.169.254 by itself (option 121). Only Vultr's class requires it, in 22.4.
    pub(super) metadata_route: bool,
    /// Adds fields to the record.
    pub(super) record: fn(&mut Value),
    pub(super) instance_id: Word,
    /// Method and path of a request unique to this dialect. In every form it must be answered with 200.
    pub(super) asks: &'static str,
    /// What the dialect does with vendor-data.
    pub(super) vendor_data: VendorData,
    /// Whether the dialect carries only text, so that compressed user-data arrives in a MIME part.
    pub(super) text_only: bool,
    pub(super) forms: &'static [Form],
    /// A form in which the client sleeps whatever the answer is, the number of seconds, and the reason.
    pub(super) sleeps: Option<(Form, f64, &'static str)>,
    /// Deviations of the distribution's cloud-init, if it is too old.
    pub(super) too_new: Option<TooNew>,
    /// A warning after which to crawl again: it shows that the machine was too slow for a race inside the client.
    pub(super) again_after: Option<&'static str>,
    /// What the datasource must add to the machine's cloud-config.
    pub(super) own_config: Value,
}

impl Case {
    /// A local-stage datasource with default settings.
    pub(super) fn of(class: &'static str) -> Self {
        Self {
            class,
            releases: &[Release::Distribution, Release::Newer],
            stage: Stage::Local,
            dmi: &[],
            files: &[],
            config: json!({}),
            uuid: "7c0f1a52",
            dhcp_server: host::ADDRESS,
            metadata_route: false,
            record: |_| {},
            instance_id: Word::Uuid,
            asks: "",
            vendor_data: VendorData::Unknown,
            text_only: false,
            forms: &Form::ALL,
            sleeps: None,
            too_new: None,
            again_after: None,
            own_config: json!({}),
        }
    }

    /// Crawls with every release.
    pub(super) fn run(&self) {
        for release in self.releases {
            let Some(cloud_init) = CloudInit::or_skip(*release) else { return };
            self.run_with(cloud_init);
        }
    }

    /// Crawls in every form, each in a guest of its own, and reports every deviation at once.
    fn run_with(&self, cloud_init: &CloudInit) {
        let records = tempfile::tempdir().expect("a directory");
        let host = Host::new().expect("a node");
        let guests: Vec<Guest> = (0..)
            .zip(self.forms)
            .map(|(number, &form)| {
                let identity = Identity::of(number);
                let mut record = form.record(&identity, &self.uuid(&identity));
                (self.record)(&mut record);
                replace(&identity.path(records.path()), &record.to_string()).expect("a record file");
                self.boot(&host, &identity)
            })
            .collect();
        let port = |guest: &Guest| PortArgument::new(guest.host_tap().name(), guest.identity().mac);
        let ports: Vec<_> = guests.iter().map(port).collect();
        let _agent = Agent::start(host.ns(), records.path(), &ports).expect("an agent");
        let mut deviations = String::new();
        for (guest, &form) in guests.iter().zip(self.forms) {
            let crawl = match self.crawl(cloud_init, guest) {
                Ok(crawl) => crawl,
                Err(error) => {
                    writeln!(deviations, "{form:?}: {error:#}").expect("text has room");
                    continue;
                }
            };
            eprintln!(
                "{:16} {:8} {:3} requests {:6.2} s, slept {} s, cloud-init {}",
                self.class,
                format!("{form:?}").to_lowercase(),
                crawl.requests.len(),
                crawl.seconds,
                crawl.slept(),
                crawl.version,
            );
            let mut wrong = self.wrong(guest.identity(), form, &crawl);
            if let Some(too_new) = self.too_new.as_ref().filter(|_| !crawl.is_newer) {
                too_new.forgive(form, &mut wrong);
            }
            if !wrong.is_empty() {
                let asked = crawl.requests.iter().map(|asked| format!("{} {}", asked.status, asked.request));
                let shown: Vec<_> = asked.chain(crawl.warnings.iter().cloned()).collect();
                let (wrong, shown) = (wrong.join("\n    "), shown.join("\n        "));
                writeln!(deviations, "{form:?}:\n    {wrong}\n        {shown}").expect("text has room");
            }
        }
        assert!(deviations.is_empty(), "{}\n{deviations}", self.class);
    }

    /// Crawls once, and again after the warning [`Case::again_after`], up to [`MAX_CRAWLS`] times in all.
    fn crawl(&self, cloud_init: &CloudInit, guest: &Guest) -> Result<Crawl> {
        let machine = self.machine(guest.identity());
        let mut crawl = cloud_init.crawl(guest.ns(), self.class, &machine)?;
        for _ in 1..MAX_CRAWLS {
            let lost = self.again_after.filter(|lost| crawl.warnings.iter().any(|text| text.contains(lost)));
            let Some(lost) = lost else { break };
            eprintln!("{} crawls again after {lost:?}", self.class);
            crawl = cloud_init.crawl(guest.ns(), self.class, &machine)?;
        }
        Ok(crawl)
    }

    fn uuid(&self, identity: &Identity) -> String {
        format!("{}{}", self.uuid, &identity.instance_id[self.uuid.len()..])
    }

    fn text(&self, word: Word, identity: &Identity) -> String {
        match word {
            Word::Text(text) => text.to_owned(),
            Word::Number => NUMBER.to_owned(),
            Word::Ec2 => EC2_ID.to_owned(),
            Word::Uuid => self.uuid(identity),
            Word::Ocid => format!("ocid1.instance.oc1..{}", self.uuid(identity)),
        }
    }

    /// A dual-stack guest, configured as far as the stage of the boot requires.
    fn boot(&self, host: &Host, identity: &Identity) -> Guest {
        let spec = Spec { route: Route::Gateway, ..Spec::of(identity) };
        let guest = Guest::boot(host, &spec).expect("a guest");
        if self.stage == Stage::Local {
            guest.ns().ip(&format!("-4 addr flush dev {NIC}")).expect("a NIC without addresses");
        }
        guest.enable_ipv6().expect("IPv6");
        guest.ns().ip(&format!("-6 route add fd00::/8 dev {NIC}")).expect("a route");
        guest
    }

    fn machine(&self, identity: &Identity) -> Machine {
        // A lease of a network that knows nothing of the service: a router, and no route to a metadata address.
        let mut lease = vec![
            ("interface", NIC.to_owned()),
            ("fixed-address", identity.address.to_string()),
            ("subnet-mask", "255.255.0.0".to_owned()),
            ("routers", host::ADDRESS.to_string()),
            ("dhcp-server-identifier", self.dhcp_server.to_string()),
        ];
        if self.metadata_route {
            let gateway = host::ADDRESS.octets().map(|byte| byte.to_string()).join(",");
            let routes = format!("32,169,254,169,254,0,0,0,0,0,{gateway}");
            lease.push(("rfc3442-classless-static-routes", routes));
        }
        Machine {
            dmi: self.dmi.iter().map(|&(name, word)| (name, self.text(word, identity))).collect(),
            config: json!({
                "datasource": self.config,
                "datasource_list": [],
                "system_info": {"default_user": {"name": USER}},
                "users": ["default"],
            }),
            lease: lease.into_iter().collect(),
            files: self.files.iter().copied().collect(),
        }
    }

    /// Every difference between a crawl and the record.
    fn wrong(&self, identity: &Identity, form: Form, crawl: &Crawl) -> Vec<String> {
        let mut wrong = Vec::new();
        let mut check = |what: &str, got: &str, expected: &str| {
            if got != expected {
                wrong.push(format!("{what}: got {got:?}, expected {expected:?}"));
            }
        };
        let allowed = match self.sleeps {
            Some((slow, seconds, _)) if slow == form => seconds,
            _ => 0.0,
        };
        check("seconds slept", &format!("{:.1}", crawl.slept()), &format!("{allowed:.1}"));
        check("found", &format!("{} {}", crawl.found, crawl.trouble), "true ");
        if !crawl.found {
            return wrong;
        }
        let key = if form == Form::Bare { "" } else { &identity.ssh_key };
        let user_data = self.user_data(identity, form);
        let vendor_data = match self.vendor_data {
            VendorData::Taken if form != Form::Bare => VENDOR_DATA,
            VendorData::TakenByNewer if form != Form::Bare && crawl.is_newer => VENDOR_DATA,
            _ => "",
        };
        check("instance-id", &crawl.instance_id, &self.text(self.instance_id, identity));
        check("hostname", &crawl.hostname, &identity.hostname);
        check("keys", &crawl.ssh_keys.join("|"), key);
        check("user-data", &lossless(&crawl.user_data), &lossless(&user_data));
        check("vendor-data", &lossless(&crawl.vendor_data), &lossless(vendor_data.as_bytes()));
        check("trouble with the network", &crawl.network_trouble, "");
        for (name, value) in self.own_config.as_object().into_iter().flatten() {
            check(name, &crawl.own_config[name].to_string(), &value.to_string());
        }
        let asked = crawl.requests.iter().any(|asked| asked.status == 200 && asked.is(self.asks));
        check(&format!("{} answered 200", self.asks), &asked.to_string(), "true");
        wrong
    }

    fn user_data(&self, identity: &Identity, form: Form) -> Vec<u8> {
        match form {
            Form::Bare => Vec::new(),
            Form::Full | Form::Required => identity.user_data.clone().into_bytes(),
            Form::Gzip if self.text_only => format!(
                "MIME-Version: 1.0\nContent-Type: application/gzip\n\
                 Content-Transfer-Encoding: base64\n\n{GZIP}\n"
            )
            .into_bytes(),
            Form::Gzip => STANDARD.decode(GZIP).expect("base64"),
        }
    }
}

/// Returns UTF-8 unchanged and anything else as base64.
fn lossless(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => STANDARD.encode(bytes),
    }
}
