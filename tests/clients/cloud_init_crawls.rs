//! cloud-init's unmodified datasource classes accept what the record provides, and never sleep.
//!
//! Each class runs under the firmware identity of its cloud, on four forms of the record. A datasource of the
//! local stage starts on a NIC without addresses and gets its lease from the test. With `--nocapture` each
//! crawl prints its requests and seconds. Classes that the distribution's cloud-init lacks come from Debian's
//! `forky`. `XDP_IMDS_CLOUD_INIT=DIRECTORY` uses the classes of a checkout instead.

mod case;
mod form;

use case::Word::{Ec2, Number, Ocid, Text, Uuid};
use case::{Case, Stage, TooNew, VendorData};
use form::Form;
use serde_json::{Value, json};
use support::cloudinit::Release;
use support::guest::METADATA;

const SERIAL: &str = "system-serial-number";
const UUID: &str = "system-uuid";
const PRODUCT: &str = "system-product-name";
const VENDOR: &str = "system-manufacturer";
const ASSET_TAG: &str = "chassis-asset-tag";
/// The root password of dialects that provide one.
const PASSWORD: &str = "correct-horse";

#[test]
fn nocloud_guests_find_their_seed() {
    Case {
        stage: Stage::Network,
        dmi: &[(SERIAL, Text("ds=nocloud;dsmode=net;s=http://169.254.169.254/v1/"))],
        // Without a label the class does not search disks for a seed.
        config: json!({"NoCloud": {"fs_label": null}}),
        asks: "GET /v1/meta-data",
        vendor_data: VendorData::Taken,
        ..Case::of("NoCloudNet")
    }
    .run();
}

#[test]
fn openstack_guests_find_their_cloud() {
    Case {
        dmi: &[(PRODUCT, Text("OpenStack Nova")), (UUID, Uuid)],
        asks: "GET /openstack/2018-08-27/meta_data.json",
        vendor_data: VendorData::Taken,
        sleeps: Some((Form::Required, 5.0, "it crawls EC2's tree as well, and never with a token")),
        ..Case::of("OpenStackLocal")
    }
    .run();
}

#[test]
fn ec2_guests_find_their_cloud_with_a_token() {
    Case {
        dmi: &[(UUID, Uuid), (SERIAL, Uuid)],
        uuid: "ec2f1a52",
        instance_id: Ec2,
        asks: "PUT /latest/api/token",
        ..Case::of("Ec2Local")
    }
    .run();
}

#[test]
fn guests_with_unknown_firmware_find_the_ec2_tree_without_a_token() {
    Case {
        stage: Stage::Network,
        dmi: &[(UUID, Uuid)],
        config: json!({"Ec2": {"strict_id": false}}),
        instance_id: Ec2,
        asks: "GET /2009-04-04/meta-data/instance-id",
        forms: &[Form::Full, Form::Bare, Form::Gzip],
        ..Case::of("Ec2")
    }
    .run();
}

#[test]
fn aliyun_guests_find_their_cloud() {
    Case {
        stage: Stage::Network,
        dmi: &[(PRODUCT, Text("Alibaba Cloud ECS"))],
        instance_id: Ec2,
        asks: "GET /2016-01-01/user-data",
        vendor_data: VendorData::TakenByNewer,
        too_new: Some(TooNew {
            forms: &[Form::Required],
            deviations: &["seconds slept: ", "found: got \"false "],
            why: "it knows no tokens on this cloud",
        }),
        ..Case::of("AliYun")
    }
    .run();
}

#[test]
fn gce_guests_find_their_cloud() {
    Case {
        dmi: &[(PRODUCT, Text("Google Compute Engine"))],
        instance_id: Number,
        // The class ignores the administrator's keys unless the name is that of the image's default account. Keys
        // without an account belong to the default account.
        record: |record| record["admin"] = json!({"user": "somebody"}),
        asks: "GET /computeMetadata/v1/instance/id",
        ..Case::of("GCELocal")
    }
    .run();
}

#[test]
fn azure_guests_find_their_cloud_and_report_ready() {
    Case {
        dmi: &[(ASSET_TAG, Text("7783-7084-3265-9085-8269-3286-77")), (UUID, Uuid)],
        config: json!({"Azure": {"data_dir": "@DIRECTORY@/waagent"}}),
        asks: "POST /machine?comp=health",
        ..Case::of("Azure")
    }
    .run();
}

#[test]
fn digitalocean_guests_find_their_cloud_from_a_link_local_address() {
    Case {
        dmi: &[(VENDOR, Text("DigitalOcean")), (SERIAL, Number)],
        instance_id: Number,
        asks: "GET /metadata/v1.json",
        vendor_data: VendorData::Taken,
        text_only: true,
        ..Case::of("DigitalOcean")
    }
    .run();
}

#[test]
fn upcloud_guests_find_their_cloud() {
    Case {
        dmi: &[(VENDOR, Text("UpCloud")), (UUID, Uuid)],
        asks: "GET /metadata/v1.json",
        vendor_data: VendorData::Taken,
        text_only: true,
        ..Case::of("UpCloudLocal")
    }
    .run();
}

#[test]
fn hetzner_guests_find_their_cloud() {
    Case {
        dmi: &[(VENDOR, Text("Hetzner")), (SERIAL, Number)],
        instance_id: Number,
        asks: "GET /hetzner/v1/metadata",
        vendor_data: VendorData::Taken,
        ..Case::of("Hetzner")
    }
    .run();
}

#[test]
fn vultr_guests_find_their_cloud() {
    Case {
        dmi: &[(VENDOR, Text("Vultr")), (SERIAL, Number)],
        metadata_route: true,
        asks: "GET /v1.json",
        vendor_data: VendorData::Taken,
        text_only: true,
        ..Case::of("Vultr")
    }
    .run();
}

#[test]
fn scaleway_guests_find_their_cloud() {
    Case {
        dmi: &[(VENDOR, Text("Scaleway"))],
        asks: "GET /conf?format=json",
        vendor_data: VendorData::Taken,
        text_only: true,
        // The class connects from port 1 again 0.8 ms after it closes the first connection. By then its own kernel
        // must have the last acknowledgement, which takes a tenth of that on an idle machine.
        again_after: Some("Cannot assign requested address"),
        ..Case::of("Scaleway")
    }
    .run();
}

/// The configuration a datasource derives from a password server's answer.
fn password() -> Value {
    json!({"password": PASSWORD, "ssh_pwauth": true})
}

fn cloudstack(record: &mut Value) {
    record["admin"]["password"] = PASSWORD.into();
    record["serve"]["date_tree"] = "cloudstack".into();
}

#[test]
fn exoscale_guests_find_their_cloud_and_their_password() {
    Case {
        stage: Stage::Network,
        dmi: &[(PRODUCT, Text("Exoscale Compute Platform"))],
        record: cloudstack,
        asks: "GET /1.0/",
        own_config: password(),
        ..Case::of("Exoscale")
    }
    .run();
}

#[test]
fn cloudstack_guests_find_their_cloud_and_their_password() {
    Case {
        stage: Stage::Network,
        dmi: &[(PRODUCT, Text("CloudStack KVM Hypervisor"))],
        dhcp_server: METADATA,
        record: cloudstack,
        asks: "GET /latest/meta-data/instance-id",
        own_config: password(),
        ..Case::of("CloudStack")
    }
    .run();
}

#[test]
fn oracle_guests_find_their_cloud() {
    Case {
        dmi: &[(ASSET_TAG, Text("OracleCloud.com")), (UUID, Uuid)],
        instance_id: Ocid,
        asks: "GET /opc/v2/instance/",
        ..Case::of("Oracle")
    }
    .run();
}

#[test]
fn nwcs_guests_find_their_cloud() {
    Case {
        dmi: &[(VENDOR, Text("NWCS"))],
        asks: "GET /api/v1/metadata",
        vendor_data: VendorData::Taken,
        text_only: true,
        ..Case::of("NWCS")
    }
    .run();
}

#[test]
fn bigstep_guests_find_their_cloud_by_the_url_in_their_image() {
    Case {
        stage: Stage::Network,
        files: &[("data/seed/bigstep/url", "http://169.254.169.254/bigstep/metadata")],
        asks: "GET /bigstep/metadata",
        vendor_data: VendorData::Taken,
        text_only: true,
        ..Case::of("Bigstep")
    }
    .run();
}

#[test]
fn maas_guests_find_their_region_with_an_oauth_signature() {
    Case {
        stage: Stage::Network,
        config: json!({"MAAS": {
            "metadata_url": "http://169.254.169.254/MAAS/metadata/",
            "consumer_key": "consumer",
            "token_key": "token",
            "token_secret": "secret",
        }}),
        record: |record| {
            record["credentials"]["maas"] =
                json!({"consumer_key": "consumer", "token_key": "token", "token_secret": "secret"});
        },
        asks: "GET /MAAS/metadata/2012-03-01/meta-data/instance-id",
        vendor_data: VendorData::Taken,
        ..Case::of("MAAS")
    }
    .run();
}

#[test]
fn akamai_guests_find_their_cloud() {
    Case {
        dmi: &[(VENDOR, Text("Akamai")), (SERIAL, Number)],
        instance_id: Number,
        asks: "PUT /v1/token",
        releases: &[Release::Newer],
        ..Case::of("AkamaiLocal")
    }
    .run();
}

#[test]
fn cloudcix_guests_find_their_cloud() {
    Case {
        stage: Stage::Network,
        dmi: &[(PRODUCT, Text("CloudCIX"))],
        instance_id: Number,
        asks: "GET /v1/metadata",
        text_only: true,
        releases: &[Release::Newer],
        ..Case::of("CloudCIX")
    }
    .run();
}
