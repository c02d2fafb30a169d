//! Claims of a VM, from its record.

use metadata_common::mac::Mac;
use serde_json::{Map, Value};

use super::wanted::Form;
use crate::record::Record;
use crate::record::identity::escape_parts;

/// What the tokens of one VM say, besides audience and times.
#[derive(Debug)]
pub(super) struct Claims {
    subject: Box<str>,
    /// The claim `vm` without the NIC.
    vm: Map<String, Value>,
    nics: Box<[(Mac, Box<str>)]>,
}

impl Claims {
    pub(super) fn of(record: &Record, trust_domain: Option<&str>) -> Self {
        let vm = &record.vm;
        let image = record.image.as_ref().map(|image| image.id.as_str());
        let host = record.placement.host.as_ref().map(|host| host.as_str());
        let namespace = Some(record.namespace()).filter(|namespace| !namespace.is_empty());
        let members = [
            ("owner", Some(record.owner_text())),
            ("uuid", Some(vm.uuid.as_str())),
            ("name", Some(vm.name.as_str())),
            ("namespace", namespace),
            ("project", Some(vm.project.id.as_str())),
            ("image", image),
            ("node", host),
            ("region", Some(record.placement.region.as_str())),
            ("zone", Some(record.placement.zone.as_str())),
        ];
        let members = members.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?.into())));
        let nics = record.network.nics.iter();
        Self {
            subject: subject(record, trust_domain).into(),
            vm: members.collect(),
            nics: nics.filter_map(|nic| Some((nic.mac?.0, nic.id.as_str().into()))).collect(),
        }
    }

    pub(super) fn subject(&self) -> &str {
        &self.subject
    }

    /// Returns the claims of a token for an audience, in the form of a cloud.
    pub(super) fn in_form(&self, audience: &str, form: &Form) -> Map<String, Value> {
        let mut claims = form.claims.clone();
        claims.insert("aud".to_owned(), audience.into());
        claims.insert("sub".to_owned(), (&*self.subject).into());
        claims
    }

    /// Returns the claims of a token for an audience, which the NIC with this MAC asks for.
    pub(super) fn for_audience(&self, audience: &str, mac: Option<Mac>) -> Map<String, Value> {
        let mut vm = self.vm.clone();
        if let Some(mac) = mac {
            let mut nic = Map::new();
            nic.insert("mac".into(), mac.to_string().into());
            if let Some((_, id)) = self.nics.iter().find(|(known, _)| *known == mac) {
                nic.insert("id".into(), (&**id).into());
            }
            vm.insert("nic".into(), nic.into());
        }
        let claims = [("aud", audience.into()), ("sub", (&*self.subject).into()), ("vm", vm.into())];
        claims.into_iter().map(|(name, value): (&str, Value)| (name.to_owned(), value)).collect()
    }
}

/// Returns the subject: a SPIFFE ID with a trust domain. By default it names the VM's place on its platform, which the
/// platform assigned; the claim `vm.owner` also tells the VM from an earlier one in that place.
fn subject(record: &Record, trust_domain: Option<&str>) -> String {
    let template = record.identity.as_ref().and_then(|identity| identity.subject.as_ref());
    // The parser refuses a record that lacks a value of its template.
    let given = template.and_then(|template| template.fill(record).ok());
    let owner = record.owner();
    let (kind, text) = owner.place();
    let mut place = String::new();
    escape_parts(text, &mut place);
    match (trust_domain, given) {
        (Some(domain), Some(path)) => format!("spiffe://{domain}/{path}"),
        (Some(domain), None) => format!("spiffe://{domain}/{kind}/{place}"),
        (None, Some(given)) => given,
        (None, None) => format!("{kind}:{place}"),
    }
}
