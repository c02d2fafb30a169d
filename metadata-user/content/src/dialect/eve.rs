//! LF Edge's EVE: the paths that its `pkg/pillar/cmd/msrv` serves to applications in addition to OpenStack's tree.
//!
//! An application's host name is its UUID. Values that only EVE's controller knows (device UUID, enterprise) are
//! empty. There is no TPM to sign with, so `tpm/signer` is 404, as in older versions of EVE.

use std::net::{IpAddr, SocketAddr};

use serde_json::Value;

use super::route_builder::{JSON, RouteBuilder, TEXT, computed};
use super::{Description, Mount};
use crate::dialect::json::json;
use crate::http::{Method, Response, StatusCode};
use crate::mailbox::EveDocument;
use crate::record::Record;
use crate::store::{LiveRequest, Methods};

pub(super) static DIALECT: Description =
    Description::new(&[Mount::open("/eve/v1")], "vectors", render).remark("also OpenStack's tree");

const POST: Methods = Methods::of(&[Method::Post]);

fn render(record: &Record, routes: &mut RouteBuilder<'_>) {
    routes.text("/eve/v1/hostname", format!("{}\n", record.vm.uuid));
    let external = external(record);
    let addresses = if external.is_empty() {
        Response::new(StatusCode(204), None, &[], "")
    } else {
        routes.found(TEXT, external.iter().map(|address| format!("{address}\n")).collect::<String>())
    };
    let addresses = routes.share(addresses);
    routes.open("/eve/v1/external_ipv4", addresses);
    let nowhere = routes.share(Response::new(StatusCode(204), None, &[], ""));
    routes.open("/eve/v1/location.json", nowhere);
    let network = network(record, &external);
    let network = computed("addresses, and the client's own address and port", move |call| {
        let mut document = network.clone();
        document["caller-ip"] = SocketAddr::from(call.connection.remote).to_string().into();
        Response::new(StatusCode(200), Some(JSON), &[], document.to_string())
    });
    routes.live("/eve/v1/network.json", Methods::READ, &[], network);
    for (path, document) in [
        ("/eve/v1/kubeconfig", EveDocument::Kubeconfig),
        // The path EVE serves, and the shorter one in its documentation.
        ("/eve/v1/app/appCustomStatus", EveDocument::AppCustomStatus),
        ("/eve/v1/appCustomStatus", EveDocument::AppCustomStatus),
    ] {
        let stored = computed("stores JSON of at most 32 KiB", move |call| store(call, document));
        routes.live(path, POST, &[], stored);
    }
    let no_signer = computed("404: there is no TPM to sign with", |_| Response::error(StatusCode(404), &[]));
    routes.live("/eve/v1/tpm/signer", POST, &[], no_signer);
}

/// Returns the IPv4 addresses that reach the VM from outside.
fn external(record: &Record) -> Vec<IpAddr> {
    let addresses = record.network.nics.iter().flat_map(|nic| &nic.addresses);
    addresses.filter_map(|address| address.public).map(|ip| ip.0).filter(IpAddr::is_ipv4).collect()
}

fn network(record: &Record, external: &[IpAddr]) -> Value {
    let uuid = record.vm.uuid.as_str();
    json!({
        "external-ipv4": external.iter().map(ToString::to_string).collect::<Vec<_>>().join(","),
        "hostname": uuid,
        "app-instance-uuid": uuid,
        "device-uuid": "",
        "device-name": record.placement.host.as_ref().map_or("", |host| host.as_str()),
        "project-name": "",
        "project-uuid": record.vm.project.id.as_str(),
        "enterprise-name": "",
        "enterprise-id": "",
    })
}

/// Stores a JSON document of the application, replacing the previous one.
fn store(call: &LiveRequest<'_>, document: EveDocument) -> Response {
    let media_type = call.request.headers.get("Content-Type").unwrap_or_default();
    let media_type = media_type.split(|byte| *byte == b';').next().unwrap_or_default();
    if !media_type.trim_ascii().eq_ignore_ascii_case(JSON.as_bytes()) {
        return Response::error(StatusCode(415), &[]);
    }
    match call.vm.mailbox.store_document(document, call.request.body) {
        Ok(()) => Response::new(StatusCode(200), Some(TEXT), &[], ""),
        Err(_) => Response::error(StatusCode(413), &[]),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::dialect::tests::{ask_with, full, rendered};
    use crate::http::{Method, Response};
    use crate::mailbox::EveDocument;
    use crate::store::Responses;

    fn get(responses: &Responses, path: &str) -> Response {
        ask_with(responses, Method::Get, path, &[], b"")
    }

    #[test]
    fn external_addresses_are_the_public_ipv4_addresses() {
        let mut record = full();
        record["network"]["nics"][1]["addresses"] = json!([
            {"method": "static", "address": "192.168.7.5/24", "public": "198.51.100.9"},
            {"method": "slaac", "public": "2001:db8::9"},
        ]);
        let responses = rendered(&record);
        let answer = get(&responses, "/eve/v1/external_ipv4");
        assert_eq!(answer.body().to_bytes(), "203.0.113.7\n198.51.100.9\n");
        let network = get(&responses, "/eve/v1/network.json").body().to_bytes();
        let network: Value = serde_json::from_slice(&network).expect("JSON");
        assert_eq!(network["external-ipv4"], "203.0.113.7,198.51.100.9");
        record["network"] = json!({});
        let responses = rendered(&record);
        assert_eq!(get(&responses, "/eve/v1/external_ipv4").status().0, 204);
        assert_eq!(get(&responses, "/eve/v1/location.json").status().0, 204);
        assert_eq!(get(&responses, "/eve/v1/network.json").status().0, 200);
    }

    #[test]
    fn documents_are_stored_if_they_are_json_and_small_enough() {
        let responses = rendered(&full());
        let json = &[("Content-Type", "application/json; charset=utf-8")][..];
        let long = vec![b'x'; (32 << 10) + 1];
        let status = "/eve/v1/app/appCustomStatus";
        for (path, fields, body, wanted) in [
            ("/eve/v1/kubeconfig", json, &b"{}"[..], 200),
            ("/eve/v1/kubeconfig", &[][..], b"x", 415),
            ("/eve/v1/kubeconfig", &[("content-type", "text/yaml")][..], b"x", 415),
            ("/eve/v1/kubeconfig", json, &long, 413),
            (status, json, &long[1..], 200),
            (status, json, b"[1]", 200),
            ("/eve/v1/tpm/signer", &[], b"x", 404),
        ] {
            let answer = ask_with(&responses, Method::Post, path, fields, body);
            assert_eq!(answer.status().0, wanted, "{path} {fields:?}");
        }
        let kept = |document| responses.vm().mailbox.document(document).expect("it is kept");
        assert_eq!(
            (kept(EveDocument::Kubeconfig), kept(EveDocument::AppCustomStatus)),
            ("{}".into(), "[1]".into())
        );
        let answer = get(&responses, status);
        assert_eq!((answer.status().0, answer.field("Allow")), (405, Some("POST")));
    }
}
