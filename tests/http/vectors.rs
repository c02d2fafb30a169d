//! Every dialect answers its vectors over HTTP and TCP on a simulated link, without privileges.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use metadata_common::addresses;
use metadata_content::dialect;
use metadata_content::identity::{IssuedToken, Issuer, SigningJob};
use metadata_content::on_demand::OnDemand;
use metadata_content::record::{Dialects, Record};
use metadata_content::sink::Outbox;
use metadata_content::store::{self, Interner, Store};
use metadata_content::token::Keyring;
use metadata_datapath::stack::{Stack, StackConfig};
use metadata_feed::state::mailboxes::Mailboxes;
use metadata_user::service::MetadataService;
use serde_json::{Value, json};
use support::pattern::Answered;
use support::vectors::{self, Ask, Asked, GUEST, Saved};
use support::wire::{Client, Faults, Habits, World};

const MORE: &str = include_str!("../vectors/more.jsonl");
/// Requests whose answers are signed. Instead of a signature the answer has what is signed.
const IDENTITY: &str = include_str!("../vectors/identity.jsonl");
const SYSTEMD: &str = include_str!("../vectors/systemd.jsonl");
/// Requests of clients that no registry has: Alpine's tiny-cloud, Talos, the CNI plugins of AWS and Alibaba, NixOS,
/// OpenBSD's cloud-agent; and paths and forms that only vendors' documentation has.
const CLIENTS: &str = include_str!("../vectors/clients.jsonl");
const AZURE_AGENT: &str = include_str!("../vectors/azure_agent.jsonl");
/// Virtual time within which every answer arrives. One that waits for a signature is asked for again after 2 s, because
/// nothing wakes it here.
const SOON: Duration = Duration::from_secs(3);

/// One VM. Its rendered record is served over TCP to one simulated guest.
struct Vm {
    world: World<MetadataService>,
}

fn vm(record: &Value) -> Result<Vm> {
    vm_of(record, None)
}

/// A VM of a node whose signer answers with what it was asked to sign.
fn issued_vm(record: &Value) -> Result<Vm> {
    let issuer = Issuer::new(Some("lab.example"), |order| {
        let signed = match order.work() {
            SigningJob::Jwt(claims) => json!({ "jwt": claims }),
            SigningJob::Signature(document) => json!({ "signature": document }),
            SigningJob::Envelope(document) => json!({ "pkcs7": document }),
            SigningJob::Detached(document) => json!({ "pkcs7_detached": document }),
            SigningJob::Attested(statement) => json!({ "attested": statement }),
        };
        order.signed(IssuedToken { text: signed.to_string().into(), issued: 0, expires: 4_000_000_000 });
        true
    });
    issuer.set_signs_documents(true);
    vm_of(record, Some(&issuer))
}

fn vm_of(record: &Value, issuer: Option<&Issuer>) -> Result<Vm> {
    let record = Arc::new(Record::parse("vector.json", &record.to_string())?.0);
    let mailbox = Mailboxes::in_memory(Outbox::detached()).for_record(
        metadata_content::source::RecordSource::File,
        "vm.json",
        &record,
    );
    let mut vm = store::VmState::of(&record, Arc::new(Keyring::ephemeral()), mailbox);
    if let Some(issuer) = issuer {
        vm = vm.issued_by(issuer, &record);
    }
    let responses = dialect::render_asked(&record, &mut Interner::new(), vm, Dialects::NONE);
    let content = Arc::new(OnDemand::new(Store::new(1)));
    content.store().publish(0, Arc::new(responses))?;
    let config = StackConfig { served: addresses::ALL.to_vec(), ..StackConfig::default() };
    let stack = Stack::new(config, MetadataService::new(content));
    let client = Client::at(GUEST, 0, 0, Habits::default());
    Ok(Vm { world: World::new(stack, client, Faults::NONE, 0) })
}

impl Ask for Vm {
    fn ask(&mut self, asked: &Asked) -> Result<Vec<u8>> {
        let talk = self.world.client.begin_to(asked.to, asked.source_port, &asked.bytes);
        let ended = self.world.run(SOON, |world| world.client.talks[talk].ended);
        self.world.client.close(talk);
        let closed = self.world.run(SOON, |world| world.client.is_over(talk));
        let received = self.world.client.talks[talk].received.clone();
        ensure!(
            ended,
            "the answer has not ended after {SOON:?}, so far {:?}",
            String::from_utf8_lossy(&received)
        );
        ensure!(closed, "the connection is not closed after {SOON:?}");
        // The service closed first, so TIME-WAIT is on its side and the guest can reuse the port at once.
        self.world.client.forget(talk);
        Ok(received)
    }
}

#[test]
fn every_dialect_answers_its_vectors_in_order() {
    vectors::run(vectors::ALL, vm).expect("vectors").assert(185);
}

#[test]
fn what_is_signed_for_a_vm_is_as_specified() {
    vectors::run(IDENTITY, issued_vm).expect("vectors").assert(18);
}

#[test]
fn requests_that_no_client_sends_are_answered_as_specified() {
    vectors::run(MORE, vm).expect("vectors").assert(43);
}

#[test]
fn systemds_client_gets_an_answer_for_each_key_of_its_table() {
    vectors::run(SYSTEMD, vm).expect("vectors").assert(56);
}

#[test]
fn clients_of_other_distributions_get_the_forms_that_they_read() {
    vectors::run(CLIENTS, vm).expect("vectors").assert(147);
}

#[test]
fn azures_agent_is_answered_on_both_ports_of_the_wireserver() {
    vectors::run(AZURE_AGENT, vm).expect("vectors").assert(9);
}

#[test]
fn all_dialects_of_one_vm_are_served_on_their_addresses() {
    let mut vm = vm(&serde_yaml::from_str(vectors::RECORD).expect("YAML")).expect("a VM");
    for to in addresses::ALL.into_iter().filter(IpAddr::is_ipv4) {
        let bytes = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".to_vec();
        let received = vm.ask(&Asked { source_port: 40_000, to: (to, 80), bytes }).expect("an answer");
        assert!(received.starts_with(b"HTTP/1.1 "), "{to}");
    }
}

#[test]
fn a_wrong_answer_fails_its_vector() {
    let mut checked = 0;
    vectors::each(MORE, vm, |vm, vector, saved: &mut Saved| {
        let (method, target) = vector.request().expect("a request");
        let right = vector.ask(vm, method, target, saved).expect("an answer");
        vector.check(&right).expect("the right answer passes");
        let longer = Answered { body: [&right.body[..], b"\n"].concat(), ..right.clone() };
        let other = Answered { status: right.status + 1, ..right.clone() };
        let encoded = Answered { head: format!("{}Content-Encoding: gzip\r\n", right.head), ..right.clone() };
        let dateless = Answered { head: right.head.replace("Date: ", "Day: "), ..right };
        for wrong in [longer, other, encoded, dateless] {
            assert!(vector.check(&wrong).is_err(), "vector {} accepts {wrong:?}", vector.n);
        }
        checked += 1;
    })
    .expect("vectors");
    assert!(checked > 0);
}
