"""Low precision where a device lacks it, or has it only slowly: decided here, computed in fp32."""
