//! The attributes Afterburn reads from a full record, for each cloud whose dialect we serve.

use super::node::{EC2_ID, LOCAL, NUMBER, PRIVATE, PUBLIC, V6};

const UUID: &str = "7c0f1a52-3b5e-4d1a-9d2c-000000000007";
const FQDN: &str = "guest-7.lab.internal";
const SHORT: &str = "guest-7";

/// One cloud that both Afterburn and xdp-imds support.
pub(super) struct Cloud {
    /// Afterburn's name for the cloud.
    pub(super) provider: &'static str,
    /// Prefix of the attributes' names.
    pub(super) prefix: &'static str,
    /// Every expected attribute, without the prefix.
    pub(super) attributes: &'static [(&'static str, &'static str)],
    /// The host name Afterburn would set.
    pub(super) hostname: Option<&'static str>,
}

/// Clouds served by a record with `date_tree: ec2`.
pub(super) const CLOUDS: &[Cloud] = &[
    Cloud {
        provider: "akamai",
        prefix: "AKAMAI_",
        attributes: &[
            ("INSTANCE_ID", NUMBER),
            ("INSTANCE_HOST_UUID", UUID),
            ("INSTANCE_LABEL", SHORT),
            ("INSTANCE_REGION", "local"),
            ("INSTANCE_TYPE", "std.small"),
            ("INSTANCE_TAGS", "web"),
            ("PUBLIC_IPV4_0", "203.0.113.7/32"),
            ("PRIVATE_IPV4_0", "10.0.16.7/32"),
            ("PRIVATE_IPV4_1", "192.168.7.5/32"),
            ("IPV6_SLAAC", "2001:db8::7/128"),
            ("IPV6_LINK_LOCAL", "fe80::5054:ff:fe69:7/128"),
        ],
        hostname: None,
    },
    Cloud {
        provider: "aliyun",
        prefix: "ALIYUN_",
        attributes: &[
            ("EIPV4", PUBLIC),
            ("HOSTNAME", SHORT),
            ("INSTANCE_ID", EC2_ID),
            ("INSTANCE_TYPE", "std.small"),
            ("IPV4_PRIVATE", LOCAL),
            ("IPV4_PUBLIC", PUBLIC),
            ("REGION_ID", "local"),
            ("VPC_ID", "vpc-292172a719c3f1f80"),
            ("ZONE_ID", "local-a"),
        ],
        hostname: Some(SHORT),
    },
    Cloud {
        provider: "aws",
        prefix: "AWS_",
        attributes: &[
            ("AVAILABILITY_ZONE", "local-a"),
            ("HOSTNAME", FQDN),
            ("INSTANCE_ID", EC2_ID),
            ("INSTANCE_TYPE", "std.small"),
            ("IPV4_LOCAL", LOCAL),
            ("IPV4_PUBLIC", PUBLIC),
            ("IPV6", V6),
            ("PUBLIC_HOSTNAME", FQDN),
            ("REGION", "local"),
        ],
        hostname: Some(FQDN),
    },
    Cloud {
        provider: "digitalocean",
        prefix: "DIGITALOCEAN_",
        attributes: &[
            ("HOSTNAME", FQDN),
            ("REGION", "local"),
            // The NIC's own address: Afterburn configures the NIC with it.
            ("IPV4_PUBLIC_0", LOCAL),
            ("IPV6_PUBLIC_0", V6),
            ("IPV4_PRIVATE_0", PRIVATE),
        ],
        hostname: Some(FQDN),
    },
    Cloud {
        provider: "gcp",
        prefix: "GCP_",
        attributes: &[
            ("HOSTNAME", FQDN),
            ("IP_EXTERNAL_0", PUBLIC),
            ("IP_LOCAL_0", LOCAL),
            ("MACHINE_TYPE", "projects/1/machineTypes/std.small"),
        ],
        hostname: Some(FQDN),
    },
    Cloud {
        provider: "hetzner",
        prefix: "HETZNER_",
        attributes: &[
            ("AVAILABILITY_ZONE", "local-a"),
            ("HOSTNAME", FQDN),
            ("INSTANCE_ID", NUMBER),
            ("PUBLIC_IPV4", PUBLIC),
            ("PUBLIC_IPV6", V6),
            ("REGION", "local"),
            ("PRIVATE_IPV4_0", PRIVATE),
        ],
        hostname: Some(FQDN),
    },
    Cloud {
        provider: "openstack-metadata",
        prefix: "OPENSTACK_",
        attributes: &[
            ("HOSTNAME", FQDN),
            ("INSTANCE_ID", EC2_ID),
            ("INSTANCE_TYPE", "std.small"),
            ("INSTANCE_UUID", UUID),
            ("IPV4_LOCAL", LOCAL),
            ("IPV4_PUBLIC", PUBLIC),
        ],
        hostname: Some(FQDN),
    },
    Cloud {
        provider: "oraclecloud",
        prefix: "ORACLECLOUD_",
        attributes: &[
            ("AVAILABILITY_DOMAIN", "local-a"),
            ("COMPARTMENT_ID", "lab"),
            ("FAULT_DOMAIN", "FAULT-DOMAIN-1"),
            ("HOSTNAME", SHORT),
            ("INSTANCE_ID", "ocid1.instance.oc1..7c0f1a52-3b5e-4d1a-9d2c-000000000007"),
            ("INSTANCE_SHAPE", "std.small"),
            ("REGION_ID", "local"),
        ],
        hostname: Some(SHORT),
    },
    Cloud {
        provider: "scaleway",
        prefix: "SCALEWAY_",
        attributes: &[
            ("HOSTNAME", SHORT),
            ("INSTANCE_ID", UUID),
            ("INSTANCE_TYPE", "std.small"),
            ("IPV4_PRIVATE", LOCAL),
            ("IPV4_PUBLIC", PUBLIC),
            ("IPV6_PUBLIC", V6),
            ("ZONE_ID", "local-a"),
        ],
        hostname: Some(SHORT),
    },
    Cloud {
        provider: "upcloud",
        prefix: "UPCLOUD_",
        attributes: &[("HOSTNAME", FQDN), ("INSTANCE_ID", UUID), ("REGION", "local")],
        hostname: Some(FQDN),
    },
    Cloud {
        provider: "vultr",
        prefix: "VULTR_",
        attributes: &[("HOSTNAME", SHORT), ("INSTANCE_ID", NUMBER), ("REGION_CODE", "LOC")],
        hostname: Some(SHORT),
    },
];

/// Clouds served by a record with `date_tree: cloudstack`.
pub(super) const FLAT: &[Cloud] = &[
    Cloud {
        provider: "cloudstack-metadata",
        prefix: "CLOUDSTACK_",
        attributes: &[
            ("AVAILABILITY_ZONE", "local-a"),
            ("CLOUD_IDENTIFIER", "CloudStack-local"),
            ("INSTANCE_ID", UUID),
            ("IPV4_LOCAL", LOCAL),
            ("IPV4_PUBLIC", PUBLIC),
            ("LOCAL_HOSTNAME", SHORT),
            ("PUBLIC_HOSTNAME", SHORT),
            ("SERVICE_OFFERING", "std.small"),
            ("VM_ID", UUID),
        ],
        hostname: None,
    },
    Cloud {
        provider: "exoscale",
        prefix: "EXOSCALE_",
        attributes: &[
            ("AVAILABILITY_ZONE", "local-a"),
            ("CLOUD_IDENTIFIER", "CloudStack-local"),
            ("INSTANCE_ID", UUID),
            ("LOCAL_HOSTNAME", SHORT),
            ("LOCAL_IPV4", LOCAL),
            ("PUBLIC_HOSTNAME", SHORT),
            ("PUBLIC_IPV4", PUBLIC),
            ("SERVICE_OFFERING", "std.small"),
            ("VM_ID", UUID),
        ],
        hostname: Some(SHORT),
    },
];

/// Azure: its goal state names a configuration that holds the attributes.
pub(super) const AZURE: &[Cloud] = &[Cloud {
    provider: "azure",
    prefix: "AZURE_",
    // No IPV4_VIRTUAL: this release expects `loadBalancedPublicAddress` as an element, but it is an attribute.
    attributes: &[("IPV4_DYNAMIC", LOCAL), ("VMSIZE", "std.small")],
    hostname: Some(SHORT),
}];
