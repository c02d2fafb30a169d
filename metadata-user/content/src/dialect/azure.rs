//! Azure: the instance metadata service below `/metadata`, the wireserver at its own address, and the host plug-in at
//! a port of that address.
//!
//! cloud-init reports to the wireserver when it has finished. Before that it requests the goal state, and retries for
//! 20 minutes. So a VM has either both services or neither.
//!
//! All scalars are strings, except those of `extended`. Property names match in any case.

mod identity;
mod wireserver;

#[cfg(test)]
mod tests;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde_json::Value;
use std::borrow::Cow;
use std::fmt;
use std::net::IpAddr;
use std::sync::LazyLock;

use super::common::{IpVersion, speaks};
use super::document::{DocumentNode, JsonDocument, PartKind};
use super::events::{acknowledge, imf_fixdate};
use super::route_builder::{JSON, RouteBuilder, TEXT, computed};
use super::{AccessCondition, Description, Mount};
use crate::dialect::json::json;
use crate::http::{Body, Method, Response, StatusCode};
use crate::parser;
use crate::record::Record;
use crate::record::event::{AnnouncedEvent, EventDocument, EventKind, EventState};
use crate::record::network::{Address, AddressMethod, NetworkMode, Nic};
use crate::record::values::{Cidr, Line};
use crate::record::vm::{Image, Payload, SshKey};
use crate::store::{Condition, Host, LiveOutcome, LiveRequest, LiveRoute, Methods, RequestGuard};

pub(super) static DIALECT: Description = Description::new(
    &[
        Mount::open("/metadata").needs(AccessCondition::Field("Metadata", "true")),
        Mount::open("/").at(Host::Wireserver),
        Mount::open("/").at(Host::HostPlugin),
    ],
    "`DataSourceAzure`; azure-identity; ohai; systemd-imdsd; WALinuxAgent 2.2.47, 2.7.3 and 2.12; Pacemaker's \
     azure-events-az",
    render,
)
.remark(
    "`instance`, `versions`, `loadbalancer`, `scheduledevents`, `identity/oauth2/token`; `attested/document` with \
     `identity.certificate`; the wireserver and its host plug-in",
);

/// Content type of documents. That of errors has no charset.
const DOCUMENT: &str = "application/json; charset=utf-8";

/// Versions of the interface, newest last. Any date from the first one on is accepted.
const VERSIONS: [&str; 35] = [
    "2017-03-01",
    "2017-04-02",
    "2017-08-01",
    "2017-10-01",
    "2017-12-01",
    "2018-02-01",
    "2018-04-02",
    "2018-10-01",
    "2019-02-01",
    "2019-03-11",
    "2019-04-30",
    "2019-06-01",
    "2019-06-04",
    "2019-08-01",
    "2019-08-15",
    "2019-11-01",
    "2020-06-01",
    "2020-07-15",
    "2020-09-01",
    "2020-10-01",
    "2020-12-01",
    "2021-01-01",
    "2021-02-01",
    "2021-03-01",
    "2021-05-01",
    "2021-08-01",
    "2021-10-01",
    "2021-11-01",
    "2021-11-15",
    "2021-12-13",
    "2023-07-01",
    "2023-11-15",
    "2024-03-15",
    "2024-07-17",
    "2025-04-07",
];

static VERSIONS_DOCUMENT: LazyLock<Bytes> =
    LazyLock::new(|| json!({ "apiVersions": VERSIONS.as_slice() }).to_string().into());
const NO_BALANCER: &str = r#"{"error":"No load balancer metadata is found. Check if your virtual machine is using any nonbasic SKU load balancer and retry later."}"#;

static GUARDS: LazyLock<[RequestGuard; 2]> = LazyLock::new(|| {
    [
        RequestGuard {
            condition: Condition::HeaderIs { name: "Metadata", value: "true" },
            otherwise: bad("Required metadata header not specified or is incorrect"),
        },
        RequestGuard {
            condition: Condition::HeaderAbsent { name: "X-Forwarded-For" },
            otherwise: bad("X-Forwarded-For header not allowed"),
        },
    ]
});

/// Builds a 400 with the reason.
fn bad(reason: &str) -> Response {
    error(&json!({ "error": format!("Bad request. {reason}") }))
}

/// Builds a 400 with this document.
fn error(document: &Value) -> Response {
    Response::new(StatusCode(400), Some(JSON), &[], document.to_string())
}

/// Returns the subscription of a VM.
fn subscription(record: &Record) -> String {
    format!("00000000-0000-0000-0000-{}", record.vm.project.account)
}

/// Builds the 503 for what may be there later. Azure's libraries retry any 5xx and finally raise an error with this
/// text (RFC 6749 section 4.1.2.1 defines the first word).
fn later(why: &str) -> Response {
    let document = json!({ "error": "temporarily_unavailable", "error_description": why });
    Response::new(StatusCode(503), Some(JSON), &[("Retry-After", "1")], document.to_string())
}

/// Builds the 429 for a VM that asks too often.
fn too_many() -> Response {
    let document = json!({ "error": "too_many_requests", "error_description": "Use an answer again" });
    Response::new(StatusCode(429), Some(JSON), &[("Retry-After", "1")], document.to_string())
}

fn render(record: &Record, routes: &mut RouteBuilder<'_>) {
    let versions = routes.found(DOCUMENT, VERSIONS_DOCUMENT.clone());
    routes.guarded("/metadata/versions", &*GUARDS, versions);
    let events = computed("scheduled events; POST acknowledges one", {
        let document = scheduled_events(record, routes.events());
        move |call| answer_events(call, &document)
    });
    routes.live("/metadata/scheduledevents", EVENT_METHODS, &*GUARDS, events);
    // What Azure answers for a VM without a load balancer.
    let no_balancer = computed("the VM has no load balancer", |call| {
        let found = |_| Response::new(StatusCode(404), Some(JSON), &[], NO_BALANCER);
        Parameters::parse(call.request.target.query).map_or_else(|refused| refused, found)
    });
    routes.live("/metadata/loadbalancer", Methods::READ, &*GUARDS, no_balancer);
    let instance = Instance {
        document: routes.document(&whole(record)),
        unread: record.user_data.as_ref().is_some_and(|payload| payload.bytes().is_none()),
    };
    routes.live_below("/metadata/instance", Methods::READ, &*GUARDS, instance);
    if let Some(issuer) = routes.issuer().filter(|issuer| issuer.signs_documents()).cloned() {
        let attested = identity::AttestedDocuments::new(record, issuer);
        routes.live("/metadata/attested/document", Methods::READ, &*GUARDS, attested);
    }
    let identity = identity::Tokens::new(record, routes.issuer());
    routes.live("/metadata/identity/oauth2/token", Methods::READ, &*GUARDS, identity);
    routes.at(Host::Wireserver);
    wireserver::render(record, routes);
    routes.at(Host::HostPlugin);
    wireserver::render_host_plugin(routes);
}

// Scheduled events: https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events.

const EVENT_METHODS: Methods = Methods::of(&[Method::Get, Method::Head, Method::Post]);

/// Returns Azure's document of the pending and started events.
fn scheduled_events(record: &Record, events: &EventDocument) -> Bytes {
    let event = |known: &AnnouncedEvent| {
        let event = &known.event;
        let is_started = event.state == EventState::Started;
        json!({
            "Description": event.description(),
            // How long the host takes is not known.
            "DurationInSeconds": -1,
            "EventId": event.id.as_str(),
            "EventSource": "Platform",
            "EventStatus": if is_started { "Started" } else { "Scheduled" },
            "EventType": match event.kind {
                EventKind::Freeze => "Freeze",
                EventKind::Reboot => "Reboot",
                EventKind::Redeploy => "Redeploy",
                EventKind::Terminate => "Terminate",
                EventKind::Preempt => "Preempt",
            },
            "NotBefore": if is_started { String::new() } else { imf_fixdate(&known.time()) },
            "ResourceType": "VirtualMachine",
            "Resources": [record.vm.name.as_str()],
        })
    };
    let pending: Vec<_> = events.pending().map(event).collect();
    json!({ "DocumentIncarnation": events.incarnation, "Events": pending }).to_string().into()
}

/// Body of a POST: the events that the guest is ready for.
#[derive(serde::Deserialize)]
struct StartRequests {
    #[serde(rename = "StartRequests")]
    requests: Vec<StartRequest>,
}

#[derive(serde::Deserialize)]
struct StartRequest {
    #[serde(rename = "EventId")]
    id: String,
}

/// Answers with the document, or notes the events that the guest acknowledges. The whole body is refused if one of its
/// events does not exist.
fn answer_events(call: &LiveRequest<'_>, document: &Bytes) -> Response {
    if call.request.method != Method::Post {
        return Response::new(StatusCode(200), Some(DOCUMENT), &[], document.clone());
    }
    let Ok(StartRequests { requests }) = parser::json(call.request.body) else {
        return bad("The body must be a document with StartRequests");
    };
    let known = call.vm.mailbox.events().document();
    let is_pending =
        |request: &StartRequest| known.pending().any(|known| known.event.id.as_str() == request.id);
    if !(1..=known.events.len()).contains(&requests.len()) || !requests.iter().all(is_pending) {
        return bad("StartRequests must name pending events");
    }
    for request in &requests {
        acknowledge(call, &request.id);
    }
    Response::new(StatusCode(200), Some(DOCUMENT), &[], "")
}

/// Serves `/metadata/instance` of one VM.
struct Instance {
    document: JsonDocument,
    /// The source of the user-data has not been read yet.
    unread: bool,
}

/// Omits user-data.
impl fmt::Debug for Instance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Instance").finish_non_exhaustive()
    }
}

/// Returns the visible members of the root: `extended` only on request.
fn shown<'a>(root: DocumentNode<'a>, query: &Query) -> Vec<(Cow<'a, str>, DocumentNode<'a>)> {
    let mut members = root.members();
    members.retain(|(name, _)| query.extended || name != "extended");
    members
}

impl Instance {
    fn read(&self, path: &str, query: &Query) -> Response {
        let path: Vec<&str> = path.split('/').filter(|segment| !segment.is_empty()).collect();
        let mut members = shown(self.document.root(), query);
        let mut at = None;
        for segment in &path {
            let named = members.into_iter().find(|(name, _)| name.eq_ignore_ascii_case(segment));
            let Some((_, node)) = named else { return Response::error(StatusCode(404), &[]) };
            members = node.members();
            at = Some(node);
        }
        if self.unread && holds_user_data(&path, query) {
            // Clients retry a 503. Without the user-data they would boot unconfigured.
            return Response::error(StatusCode(503), &[("Retry-After", "1")]);
        }
        let (kind, body) = match (at, query.format) {
            (Some(node), Format::Text) if node.form() == PartKind::Scalar => (TEXT, node.text()),
            (Some(node), Format::Json) if node.form() == PartKind::Scalar => {
                return bad("Use format=text for a leaf");
            }
            (Some(node), Format::Json) => (DOCUMENT, node.json()),
            (None, Format::Json) => (DOCUMENT, object(&members)),
            (_, Format::Text) => (TEXT, listing(&members).into()),
        };
        Response::new(StatusCode(200), Some(kind), &[], body)
    }
}

/// Returns whether the answer contains the user-data.
fn holds_user_data(path: &[&str], query: &Query) -> bool {
    let above = ["compute", "userData"];
    path.iter().zip(above).all(|(segment, name)| segment.eq_ignore_ascii_case(name))
        && (query.format == Format::Json || path.len() == above.len())
}

/// Returns an object of these members without copying long ones.
fn object(members: &[(Cow<'_, str>, DocumentNode<'_>)]) -> Body {
    let mut pieces = vec![Bytes::from_static(b"{")];
    for (n, (name, node)) in members.iter().enumerate() {
        let comma = if n == 0 { "" } else { "," };
        pieces.push(format!("{comma}{}:", Value::from(name.as_ref())).into());
        pieces.extend(node.json().pieces().iter().cloned());
    }
    pieces.push(Bytes::from_static(b"}"));
    Body::join(pieces)
}

/// Returns one name per line. Names with members below end with a slash.
fn listing(members: &[(Cow<'_, str>, DocumentNode<'_>)]) -> String {
    let line = |(name, node): &(Cow<'_, str>, DocumentNode<'_>)| {
        let slash = if node.form() == PartKind::Scalar { "" } else { "/" };
        format!("{name}{slash}")
    };
    members.iter().map(line).collect::<Vec<_>>().join("\n")
}

impl LiveRoute for Instance {
    fn answer(&self, call: &LiveRequest<'_>) -> LiveOutcome {
        match Query::parse(call.request.target.query) {
            Ok(query) => self.read(call.rest, &query).into(),
            Err(refused) => refused.into(),
        }
    }

    fn about(&self) -> &'static str {
        "the part of the document at the path; needs an api-version"
    }
}

// Query parameters of requests below `/metadata`.

/// Number of versions that an error names.
const NEWEST: usize = 3;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Format {
    #[default]
    Json,
    Text,
}

/// Query parameters; none occurs twice.
#[derive(Debug)]
struct Parameters<'a>(Vec<(String, Cow<'a, str>)>);

impl<'a> Parameters<'a> {
    /// Parses the query. `Err` is the answer if a parameter occurs twice or `api-version` is missing or malformed.
    fn parse(text: &'a str) -> Result<Self, Response> {
        let mut parameters = Self(Vec::new());
        for (name, value) in form_urlencoded::parse(text.as_bytes()) {
            let name = name.to_ascii_lowercase();
            if parameters.get(&name).is_some() {
                return Err(bad("Query parameters must not be repeated"));
            }
            parameters.0.push((name, value));
        }
        if parameters.get("api-version").is_some_and(is_version) {
            return Ok(parameters);
        }
        let newest: Vec<&str> = VERSIONS.into_iter().rev().take(NEWEST).collect();
        let reason = "Bad request. api-version was not specified in the request or is not supported";
        Err(error(&json!({ "error": reason, "newest-versions": newest })))
    }

    /// Returns the value of a parameter. `name` is in lower case.
    fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_ref())
    }
}

/// Parameters of a request for `/metadata/instance`.
#[derive(Debug)]
struct Query {
    format: Format,
    extended: bool,
}

impl Query {
    fn parse(text: &str) -> Result<Self, Response> {
        let parameters = Parameters::parse(text)?;
        let format = match parameters.get("format") {
            None => Format::default(),
            Some(name) if name.eq_ignore_ascii_case("json") => Format::Json,
            Some(name) if name.eq_ignore_ascii_case("text") => Format::Text,
            Some(_) => return Err(bad("format must be json or text")),
        };
        let extended = parameters.get("extended").is_some_and(|value| value.eq_ignore_ascii_case("true"));
        Ok(Self { format, extended })
    }
}

/// Returns whether a text is a date not before the first version. Clients send the version that they were written for,
/// which need not be in [`VERSIONS`].
fn is_version(text: &str) -> bool {
    let in_range = |part: &str, most: u8| part.parse::<u8>().is_ok_and(|number| (1..=most).contains(&number));
    text.len() == 10
        && text.bytes().enumerate().all(|(at, byte)| match at {
            4 | 7 => byte == b'-',
            _ => byte.is_ascii_digit(),
        })
        && in_range(&text[5..7], 12)
        && in_range(&text[8..], 31)
        && text >= VERSIONS[0]
}

// Renders a record's instance document.

fn whole(record: &Record) -> Value {
    let mut document = json!({
        "compute": compute(record),
        "extended": { "compute": { "hasCustomData": false, "ppsType": "None" } },
    });
    // cloud-init configures no NIC from an empty list, and falls back to DHCP without the list.
    let nics: Vec<Value> = record.network.nics.iter().filter_map(interface).collect();
    if record.network.mode != NetworkMode::None && !nics.is_empty() {
        document["network"] = json!({ "interface": nics });
    }
    document
}

fn compute(record: &Record) -> Value {
    let user = admin(record);
    let bytes = record.user_data.as_ref().and_then(Payload::bytes);
    let domain = record.placement.fault_domain.as_ref().unwrap_or(&record.placement.zone);
    let tags: Vec<String> = record.metadata.0.iter().map(|(name, value)| format!("{name}:{value}")).collect();
    let tag = |(name, value): (&String, &String)| json!({ "name": name.as_str(), "value": value.as_str() });
    // Azure serves empty strings for a customer's own image.
    let image = |of: fn(&Image) -> &Option<Line>| {
        record.image.as_ref().and_then(|image| of(image).as_ref()).map_or("", Line::as_str)
    };
    let mut document = json!({
        "azEnvironment": "AzurePublicCloud",
        "location": record.placement.region.as_str(),
        "name": record.vm.name.as_str(),
        "offer": image(|image| &image.offer),
        "osProfile": {
            "adminUsername": user,
            "computerName": record.hostname.short.as_str(),
            "disablePasswordAuthentication": "true",
        },
        "osType": "Linux",
        "physicalZone": record.placement.zone.as_str(),
        "platformFaultDomain": domain.as_str(),
        "platformUpdateDomain": "0",
        "provider": "Microsoft.Compute",
        "publicKeys": record.ssh_keys.iter().map(|key| public_key(key, user)).collect::<Vec<_>>(),
        "publisher": image(|image| &image.publisher),
        "resourceGroupName": record.vm.project.id.as_str(),
        "resourceId": resource_id(record),
        "sku": image(|image| &image.sku),
        "storageProfile": storage(&image),
        "subscriptionId": subscription(record),
        "tags": tags.join(";"),
        "tagsList": record.metadata.0.iter().map(tag).collect::<Vec<_>>(),
        "userData": bytes.map_or_else(String::new, |bytes| STANDARD.encode(bytes)),
        "version": image(|image| &image.version),
        "vmId": record.vm.uuid.as_str(),
        "vmSize": record.instance_type(),
        "zone": "",
    });
    add_inapplicable(&mut document);
    document
}

/// Adds the members that records have nothing for. Azure includes them always, as empty strings.
fn add_inapplicable(compute: &mut Value) {
    for name in [
        "customData",
        "evictionPolicy",
        "isHostCompatibilityLayerVm",
        "licenseType",
        "placementGroupId",
        "platformSubFaultDomain",
        "priority",
        "vmScaleSetName",
    ] {
        compute[name] = "".into();
    }
    for (name, members) in [
        ("additionalCapabilities", &["hibernationEnabled"][..]),
        ("extendedLocation", &["name", "type"]),
        ("host", &["id"]),
        ("hostGroup", &["id"]),
        ("plan", &["name", "product", "publisher"]),
        ("securityProfile", &["encryptionAtHost", "secureBootEnabled", "securityType", "virtualTpmEnabled"]),
        ("virtualMachineScaleSet", &["id"]),
    ] {
        compute[name] = members.iter().map(|member| ((*member).to_owned(), Value::from(""))).collect();
    }
}

/// Returns the VM's id in Azure's form, from which Talos and Kubernetes make that of a node.
fn resource_id(record: &Record) -> String {
    format!(
        "/subscriptions/{}/resourceGroups/{}/providers/Microsoft.Compute/virtualMachines/{}",
        subscription(record),
        record.vm.project.id,
        record.vm.name
    )
}

/// Returns the storage profile. Of the disks the service knows nothing.
fn storage<'a>(image: &impl Fn(fn(&Image) -> &Option<Line>) -> &'a str) -> Value {
    let (nothing, no_uri) = ("", || json!({ "uri": "" }));
    json!({
        "dataDisks": [],
        "imageReference": {
            "communityGalleryImageId": nothing,
            "exactVersion": nothing,
            "id": nothing,
            "offer": image(|image| &image.offer),
            "publisher": image(|image| &image.publisher),
            "sharedGalleryImageId": nothing,
            "sku": image(|image| &image.sku),
            "version": image(|image| &image.version),
        },
        "osDisk": {
            "caching": nothing,
            "createOption": nothing,
            "diffDiskSettings": { "option": nothing },
            "diskSizeGB": nothing,
            "image": no_uri(),
            "managedDisk": { "id": nothing, "storageAccountType": nothing },
            "name": nothing,
            "osType": "Linux",
            "vhd": no_uri(),
            "writeAcceleratorEnabled": nothing,
        },
        "resourceDisk": { "size": "0" },
    })
}

fn admin(record: &Record) -> &str {
    let user = record.admin.as_ref().and_then(|admin| admin.user.as_ref());
    user.map_or("", |user| user.as_str())
}

/// Returns a key and its file: that of the key's account, else of the administrator, else of root.
fn public_key(key: &SshKey, admin: &str) -> Value {
    let home = match key.user.as_ref().map_or(admin, |user| user.as_str()) {
        "" | "root" => "/root".to_owned(),
        user => format!("/home/{user}"),
    };
    json!({ "keyData": key.key.as_str(), "path": format!("{home}/.ssh/authorized_keys") })
}

/// Returns a NIC. Azure's clients do not support VLANs and bonds.
fn interface(nic: &Nic) -> Option<Value> {
    let mac = nic.mac.filter(|_| nic.is_physical())?;
    let (v4, mut v6) = (entries(nic, true), entries(nic, false));
    if v4.is_empty() && v6.is_empty() && speaks(nic, IpVersion::V6) {
        // SLAAC alone, with an unknown address. cloud-init leaves out a NIC without entries.
        v6.push(json!({}));
    }
    let ipv4 = json!({ "ipAddress": v4, "subnet": subnets(nic, true) });
    let mut ipv6 = json!({ "ipAddress": v6 });
    let subnets = subnets(nic, false);
    if !subnets.is_empty() {
        ipv6["subnet"] = subnets.into();
    }
    let mac = mac.to_string().replace(':', "").to_uppercase();
    Some(json!({ "ipv4": ipv4, "ipv6": ipv6, "macAddress": mac }))
}

fn of_family(nic: &Nic, v4: bool) -> impl Iterator<Item = &Address> {
    nic.addresses.iter().filter(move |entry| match entry.address {
        Some(cidr) => cidr.address.is_ipv4() == v4,
        // The lease is unknown, but an entry makes cloud-init request one.
        None => entry.method == if v4 { AddressMethod::Dhcp4 } else { AddressMethod::Dhcp6 },
    })
}

fn entries(nic: &Nic, v4: bool) -> Vec<Value> {
    let entry = |address: &Address| {
        let mut entry = json!({});
        if let Some(cidr) = address.address {
            entry["privateIpAddress"] = cidr.address.to_string().into();
        }
        if v4 {
            let public = address.public.filter(|public| public.0.is_ipv4());
            entry["publicIpAddress"] = public.map_or_else(String::new, |public| public.to_string()).into();
        } else if let Some(public) = public_ipv6(address) {
            // Not part of Azure's interface, but systemd reads it.
            entry["publicIpAddress"] = public.to_string().into();
        }
        entry
    };
    // cloud-init requests the first address by DHCP and configures the others statically.
    let mut sorted: Vec<&Address> = of_family(nic, v4).collect();
    sorted.sort_by_key(|address| address.address.is_some());
    let unknown = sorted.iter().filter(|address| address.address.is_none()).count();
    sorted.into_iter().skip(unknown.saturating_sub(1)).map(entry).collect()
}

/// Returns the address that reaches the entry from outside: a translated one, or its own.
fn public_ipv6(address: &Address) -> Option<IpAddr> {
    let own = |address: &IpAddr| match address {
        IpAddr::V4(_) => false,
        IpAddr::V6(v6) => !v6.is_unique_local() && !v6.is_unicast_link_local(),
    };
    let translated = address.public.map(|public| public.0).filter(IpAddr::is_ipv6);
    translated.or_else(|| Some(address.address?.address).filter(own))
}

fn subnets(nic: &Nic, v4: bool) -> Vec<Value> {
    let subnet = |cidr: Cidr| json!({ "address": cidr.network().address.to_string(), "prefix": cidr.prefix.to_string() });
    of_family(nic, v4).filter_map(|address| address.address).map(subnet).collect()
}
